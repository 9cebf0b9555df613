// Numbers, units, ticks, running means and places for labels: all of a chart that can be worked out without a document.

const digits = (value, count) => String(Number(value.toPrecision(count)));
const thousands = (value) => value.toLocaleString("en-US", { maximumFractionDigits: 0 });
const si = (value) => {
  for (const [unit, size] of [[" T", 1e12], [" G", 1e9], [" M", 1e6], [" k", 1e3]])
    if (Math.abs(value) >= size) return digits(value / size, 3) + unit;
  return digits(value, 3);
};

// Units of an axis, from small to large: name, size, and the value at the end of the axis from which it is used.
const UNITS = {
  bytes: [["B", 1, 0], ["KiB", 2 ** 10, 2 ** 10], ["MiB", 2 ** 20, 2 ** 20], ["GiB", 2 ** 30, 2 ** 30], ["TiB", 2 ** 40, 2 ** 40]],
  seconds: [["ms", 1e-3, 0], ["s", 1, 1], ["min", 60, 180], ["h", 3600, 10800]],
  minutes: [["s", 1 / 60, 0], ["min", 1, 3], ["h", 60, 180]],
  percent: [["%", 0.01, 0]],
};
const unitOf = (kind, high) => {
  const [name, size] = (UNITS[kind] ?? [["", 1, 0]]).filter(([, , from], place) => place === 0 || high >= from).pop();
  return { name, size };
};

// A value as a person reads it, like html.show in Python.
const show = (value, kind) => {
  if (value === null || !Number.isFinite(value)) return "–";
  if (kind === "loss") return Math.abs(value) < 1e4 ? value.toFixed(4) : digits(value, 4);
  if (kind === "si") return si(value);
  if (kind === "percent") return `${(100 * value).toFixed(1)} %`;
  if (kind === "count") return thousands(value);
  if (kind === "seconds" && value < 100) return value < 1 ? `${digits(1e3 * value, 3)} ms` : `${digits(value, 3)} s`;
  if (kind === "bytes" || kind === "seconds" || kind === "minutes") {
    const unit = unitOf(kind, Math.abs(value)), number = value / unit.size;
    return `${kind === "bytes" ? number.toFixed(unit.size > 1 ? 1 : 0) : digits(number, 3)} ${unit.name}`;
  }
  return plain(value, 4);
};
const plain = (value, count) => {
  const size = Math.abs(value);
  return size && (size < 1e-4 || size >= 1e6) ? value.toExponential(count - 1).replace(/\.?0*e/, "e") : digits(value, count);
};

// The same at an axis, whose title has the unit.
const tickText = (value, kind, unit) => {
  if (value === 0) return "0";
  if (kind in UNITS) return plain(value / unit.size, 4);
  return kind === "si" || (kind === "count" && Math.abs(value) >= 1e5) ? si(value) : kind === "count" ? thousands(value) : plain(value, 4);
};

// About `count` round values from low to high.
const ticks = (low, high, count) => {
  const raw = (high - low) / count, size = 10 ** Math.floor(Math.log10(raw));
  const step = size * ([1, 2, 2.5, 5, 10].find((m) => m * size >= raw * 0.999) || 10);
  const found = [];
  if (!(step > 0) || !Number.isFinite(step)) return [low];
  for (let i = Math.ceil(low / step - 1e-9); i <= high / step + 1e-9; i++) found.push(Number((i * step).toPrecision(12)));
  return found;
};
// The same for an axis of logarithms, which has low and high as powers of ten.
const logTicks = (low, high) => {
  const found = [];
  for (let power = Math.floor(low); power <= Math.ceil(high); power++)
    for (const m of high - low < 1.6 ? [1, 2, 3, 5, 7] : high - low < 4 ? [1, 3] : [1]) {
      const value = m * 10 ** power;
      if (Math.log10(value) >= low && Math.log10(value) <= high) found.push(value);
    }
  const every = Math.ceil(found.length / 8);
  return found.length > 1 ? found.filter((_, i) => i % every === 0) : ticks(10 ** low, 10 ** high, 4).filter((v) => v > 0);
};

// Means over as many values to either side as there are near an end too, as in run_history.smoothed.
const smoothed = (values, share) => {
  const count = values.length, reach = Math.max(1, Math.round(share * count)), sums = [0], counts = [0];
  for (const value of values) {
    sums.push(sums[sums.length - 1] + (value === null ? 0 : value));
    counts.push(counts[counts.length - 1] + (value === null ? 0 : 1));
  }
  return values.map((_, i) => {
    const side = Math.min(reach, i, count - 1 - i), first = i - side, end = i + side + 1, near = counts[end] - counts[first];
    return near ? (sums[end] - sums[first]) / near : null;
  });
};

// ------------------------------------------------------------------------------------------------------------ labels
// A box is { x, y, w, h }, its upper left corner and its size in pixels; a line is a list of points [x, y], null for a gap.
const BESIDE = 6;  // pixels between labels side by side
const overlap = (a, b) => a.x < b.x + b.w + BESIDE && b.x < a.x + a.w + BESIDE && a.y < b.y + b.h && b.y < a.y + a.h;
const within = (box, bounds) =>
  box.x >= bounds.x && box.y >= bounds.y && box.x + box.w <= bounds.x + bounds.w && box.y + box.h <= bounds.y + bounds.h;
const crosses = (line, box) => line.some((end, i) => {
  const start = line[i - 1] ?? end;
  if (!end || Math.max(start[0], end[0]) < box.x || Math.min(start[0], end[0]) > box.x + box.w) return false;
  const at = (x) => end[0] === start[0] ? end[1] : start[1] + (end[1] - start[1]) * (x - start[0]) / (end[0] - start[0]);
  const inside = (x) => Math.min(Math.max(x, box.x), box.x + box.w);
  const heights = end[0] === start[0] ? [start[1], end[1]] : [at(inside(start[0])), at(inside(end[0]))];
  return Math.max(...heights) >= box.y && Math.min(...heights) <= box.y + box.h;
});

// A box for each label such that no two overlap and all are within the bounds. `labels` has the boxes that would do for each label, the
// best first, and the labels in the order of their importance: a label takes its first box that is free and clear of the lines, else its
// first that is free, and is left out (null) if there is none. `taken` are boxes that are occupied; those of the labels are added.
const placeLabels = (labels, bounds, lines = [], taken = []) => labels.map((boxes) => {
  const free = boxes.filter((box) => within(box, bounds) && !taken.some((other) => overlap(box, other)));
  const box = free.find((each) => !lines.some((line) => crosses(line, each))) ?? free[0] ?? null;
  if (box) taken.push(box);
  return box;
});
// Boxes for the label of a horizontal line at height y: above it and below, at the right end, the left, and between; then further off.
const besideLine = (y, w, h, left, right) =>
  [0, 1, 2, 3].flatMap((far) => [right - w, left, (left + right - w) / 2].flatMap((x) => [
    { x, y: y - 3 - h - far * h, w, h }, { x, y: y + 4 + far * h, w, h },
  ]));
