// Draws the charts for the width of the window and lets one look at values: crosshair, logarithmic axis, smoothing, zoom, other axes.
// It stands behind scales.js in the page. Texts of the run go through textContent and setAttribute only.

const data = JSON.parse(document.getElementById("data").textContent);
const TOP = 32, RIGHT = 16, BOTTOM = 44, LINE = 14;  // pixels around the plot, and of a line of text
const UNDONE_DOTS = 40, DOTS = 300;  // of more, the line alone is readable
const state = { axis: "step", share: 0.01, zoom: null, paper: false };
const views = [];

const svg = (name, attributes, text) => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
};
const html = (name, look, text) => {
  const element = document.createElement(name);
  if (look) element.className = look;
  if (text !== undefined) element.textContent = text;
  return element;
};
const pen = document.createElement("canvas").getContext("2d");
const widthOf = (text) => {
  pen.font = `11.5px ${getComputedStyle(document.body).fontFamily}`;
  return Math.ceil(pen.measureText(text).width) + 2;
};

// ------------------------------------------------------------------------------------------------------ the x axis
const AXES = { step: ["step", "count"], tokens: ["tokens", "si"], time: ["training time", "minutes"] };
const xOf = (run, step) => {  // between the known places, and beyond them with the slope of the last two
  if (state.axis === "step") return step;
  const steps = data.axes[run].step, values = data.axes[run][state.axis];
  if (!steps.length) return NaN;
  if (steps.length === 1) return steps[0] ? values[0] * step / steps[0] : NaN;
  let low = 0, high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle; else high = middle;
  }
  return Math.max(0, values[low] + (values[high] - values[low]) * (step - steps[low]) / (steps[high] - steps[low]));
};
const placeText = (x) => state.axis === "step" ? `step ${thousands(x)}` : state.axis === "tokens" ? `${si(x)} tokens` : show(x, "minutes");

// ---------------------------------------------------------------------------------------------------------- ranges
const spanOf = (values) => {
  let low = Infinity, high = -Infinity;
  for (const value of values) if (Number.isFinite(value)) { low = Math.min(low, value); high = Math.max(high, value); }
  return [low, high];
};
const xRange = (shown) => {
  if (state.zoom) return state.zoom;
  const [low, high] = spanOf(shown.flatMap(({ xs }) => xs));
  return high > low ? [low, high] : [(Number.isFinite(low) ? low : 0) - 1, (Number.isFinite(low) ? low : 0) + 1];
};
// The range of the y axis in its own scale, a little beyond the values that are in sight.
const yRange = (view, shown, [xLow, xHigh]) => {
  const { chart, log, usable } = view, seen = chart.levels.map(([y]) => y).filter(usable);
  for (const { c, xs, on } of shown) if (on) c.y.forEach((y, i) => { if (usable(y) && xs[i] >= xLow && xs[i] <= xHigh) seen.push(y); });
  let [low, high] = seen.length ? spanOf(seen) : log ? [1, 10] : [0, 1];
  if (chart.zero && !log && !state.zoom) { low = Math.min(0, low); high = Math.max(0, high); }
  const [bottom, top] = log ? [Math.log10(low), Math.log10(high)] : [low, high];
  const pad = 0.05 * (top - bottom) || (log ? 0.5 : 0.5 * Math.abs(top) || 1);
  return [chart.zero && !log && low === 0 ? 0 : bottom - pad, top + pad];
};
// Everything that is known of a chart before it is drawn: curves, ranges, ticks with their texts, and the way to pixels.
const measure = (view) => {
  const { chart, canvas, log } = view, height = chart.h;
  const width = state.paper ? (canvas.parentElement.classList.contains("wide") ? 1000 : 490) : Math.max(260, canvas.clientWidth);
  view.usable = (y) => y !== null && (!log || y > 0);
  const shown = chart.curves.map((c, i) => ({ c, xs: c.x.map((x) => xOf(c.r, x)), on: !view.hidden.has(i) }));
  const [xLow, xHigh] = xRange(shown), [yLow, yHigh] = yRange(view, shown, [xLow, xHigh]);
  const [xName, xKind] = AXES[state.axis], xUnit = unitOf(xKind, xHigh), yUnit = unitOf(chart.kind, log ? 10 ** yHigh : yHigh);
  const shift = Math.log10(yUnit.size), count = height > 300 ? 6 : 5;
  const yTicks = (log ? logTicks(yLow - shift, yHigh - shift) : ticks(yLow / yUnit.size, yHigh / yUnit.size, count)).map((v) => v * yUnit.size);
  const yTexts = yTicks.map((y) => tickText(y, chart.kind, yUnit));
  const left = Math.max(34, ...yTexts.map((text) => widthOf(text) + 14)), right = width - RIGHT, bottom = height - BOTTOM;
  const room = Math.max(2, Math.floor((right - left) / (widthOf(tickText(xHigh, xKind, xUnit)) + 34)));
  const xTicks = ticks(xLow / xUnit.size, xHigh / xUnit.size, Math.min(room, 10)).map((v) => v * xUnit.size);
  const titled = (name, unit) => unit ? `${name} (${unit})` : name;
  const scale = log ? Math.log10 : (y) => y;
  Object.assign(view, {
    shown, xLow, xHigh, left, right, bottom, width, height,
    px: (x) => left + (x - xLow) / (xHigh - xLow) * (right - left),
    py: (y) => bottom - (scale(y) - yLow) / (yHigh - yLow) * (bottom - TOP),
    yTicks: yTicks.map((y, i) => [y, yTexts[i]]), xTicks: xTicks.map((x) => [x, tickText(x, xKind, xUnit)]),
    titles: { x: titled(xName, xUnit.name), y: titled(chart.axis, yUnit.name || chart.unit) },
  });
};

// --------------------------------------------------------------------------------------------------------- drawing
const boxedText = (box, text, look) => svg("text", { x: box.x, y: box.y + LINE - 3, class: look }, text);  // at the left of its box
const drawAxes = (view, plot, taken) => {
  const { left, right, bottom, width, px, py } = view, everything = { x: 0, y: 0, w: width, h: view.height };
  const put = (box, text, look = "tick") => { if (placeLabels([[box]], everything, [], taken)[0]) plot.append(boxedText(box, text, look)); };
  const box = (text, x, y, share) => { const w = widthOf(text); return { x: Math.max(0, Math.min(x - share * w, width - w)), y, w, h: LINE }; };
  put(box(view.titles.y, 4, 1, 0), view.titles.y, "axis-title");
  put(box(view.titles.x, (left + right) / 2, bottom + 25, 0.5), view.titles.x, "axis-title");
  for (const [y, text] of view.yTicks) {
    plot.append(svg("line", { x1: left, x2: right, y1: py(y), y2: py(y), class: "grid" }));
    put(box(text, left - 7, py(y) - LINE / 2, 1), text);
  }
  for (const [x, text] of view.xTicks) {
    plot.append(svg("line", { x1: px(x), x2: px(x), y1: bottom, y2: bottom + 4, class: "grid" }));
    put(box(text, px(x), bottom + 7, 0.5), text);
  }
};
const path = (view, xs, ys) => {
  let mark = "M", words = "";
  ys.forEach((y, i) => {
    const there = view.usable(y) && Number.isFinite(xs[i]);
    if (there) words += mark + view.px(xs[i]).toFixed(1) + " " + view.py(y).toFixed(1);
    mark = there ? "L" : "M";
  });
  return words;
};
const drawCurve = (view, { c, xs }, inner) => {
  const { px, py, usable } = view, look = `c${c.k} ${c.s}`;
  const smooth = view.chart.noisy && c.s === "line" && c.y.length >= data.smoothed_from && state.share > 0;
  inner.append(svg("path", { d: path(view, xs, c.y), class: look + (smooth ? " faint" : c.s === "line" ? ` d${c.k}` : "") }));
  if (smooth) {
    const x = c.mx ? c.mx.map((v) => xOf(c.r, v)) : xs;
    inner.append(svg("path", { d: path(view, x, smoothed(c.my || c.y, state.share)), class: `${look} d${c.k}` }));
  }
  const lone = (i) => (c.y[i - 1] ?? null) === null && (c.y[i + 1] ?? null) === null;  // a line would not show it
  const dots = c.y.map((_, i) => i).filter((i) => usable(c.y[i]) && Number.isFinite(xs[i]) && (c.s !== "line" || lone(i)));
  if (dots.length <= (c.s === "undone" ? UNDONE_DOTS : DOTS))
    for (const i of dots) inner.append(svg("circle", { cx: px(xs[i]), cy: py(c.y[i]), r: c.s === "undone" ? 2.5 : 3.5, class: `${look} dot` }));
  for (const [step] of c.bad || []) {
    const x = px(xOf(c.r, step));
    if (x >= view.left && x <= view.right) inner.append(svg("path", { d: `M${x} ${TOP - 1}l-5 -9h10z`, class: "bad" }));
  }
};
const drawLevels = (view, plot, inner, taken) => {
  const { left, right, bottom, px, py, usable } = view, levels = view.chart.levels.filter(([y]) => usable(y));
  const lines = view.shown.filter(({ on }) => on).map(({ c, xs }) => c.y.map((y, i) => usable(y) && Number.isFinite(xs[i]) ? [px(xs[i]), py(y)] : null));
  const bounds = { x: left, y: TOP - 4, w: right - left, h: bottom - TOP + 4 };
  const boxes = placeLabels(levels.map(([y, text]) => besideLine(py(y), widthOf(text), LINE, left + 4, right)), bounds, lines, taken);
  levels.forEach(([y, text], i) => {
    inner.append(svg("line", { x1: left, x2: right, y1: py(y), y2: py(y), class: "level" }));
    if (boxes[i]) plot.append(boxedText(boxes[i], text, "tick level-text"));
  });
};
const draw = (view) => {
  measure(view);
  const { chart, left, right, bottom, width, height, px } = view, plot = svg("g", { class: "plot" }), taken = [];
  drawAxes(view, plot, taken);
  const clip = `clip-${chart.key}`, inner = svg("g", { "clip-path": `url(#${clip})` }), shape = svg("clipPath", { id: clip });
  shape.append(svg("rect", { x: left - 4, y: 0, width: right - left + 8, height: bottom + 3 }));
  plot.append(shape, inner);
  for (const [step, run] of data.resumed) {
    const x = px(xOf(run, step));
    if (x >= left && x <= right) inner.append(svg("line", { x1: x, x2: x, y1: TOP - 6, y2: bottom, class: `resume c${run % 6}` }));
  }
  for (const each of view.shown) if (each.on) drawCurve(view, each, inner);
  drawLevels(view, plot, inner, taken);
  if (!view.shown.length) plot.append(svg("text", { x: (left + right) / 2, y: (TOP + bottom) / 2, class: "tick mid" }, "nothing was logged"));
  view.cross = svg("g", { class: "marks" });
  plot.append(view.cross);
  view.picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
  view.picture.replaceChildren(plot);
};
const drawAll = () => views.forEach(draw);

// ------------------------------------------------------------------------------------------------------- crosshair
const nearest = (c, xs, x) => {
  let best = -1, low = 0, high = xs.length - 1;
  if (c.s === "undone") {  // several stretches, which need not be in order
    xs.forEach((at, i) => { if (c.y[i] !== null && (best < 0 || Math.abs(at - x) < Math.abs(xs[best] - x))) best = i; });
    return best;
  }
  while (low <= high) {
    const middle = (low + high) >> 1;
    if (best < 0 || Math.abs(xs[middle] - x) < Math.abs(xs[best] - x)) best = middle;
    if (xs[middle] < x) low = middle + 1; else high = middle - 1;
  }
  return best;
};
const point = (view, x, speaks) => {
  view.cross.replaceChildren();
  view.tip.hidden = true;
  if (x === null || x < view.xLow || x > view.xHigh) return;
  const rows = [];
  let at = null;
  for (const { c, xs, on } of view.shown) {
    const i = on ? nearest(c, xs, x) : -1;
    if (i < 0 || Math.abs(view.px(xs[i]) - view.px(x)) > (c.s === "line" ? 60 : 14)) continue;
    at = at ?? xs[i];
    const bad = (c.bad || []).find(([step]) => xOf(c.r, step) === xs[i]);
    rows.push([c, (bad ? bad[1] : show(c.y[i], view.chart.kind)) + (xs[i] === at ? "" : ` (${placeText(xs[i])})`)]);
    if (view.usable(c.y[i])) view.cross.append(svg("circle", { cx: view.px(xs[i]), cy: view.py(c.y[i]), r: 4.5, class: `c${c.k} ${c.s} dot` }));
  }
  const place = view.px(at ?? x);
  view.cross.prepend(svg("line", { x1: place, x2: place, y1: TOP - 6, y2: view.bottom, class: "cross" }));
  if (!speaks || !rows.length) return;
  view.tip.replaceChildren(html("b", "", placeText(at ?? x)));
  for (const [c, text] of rows) {
    const row = html("div");
    row.append(html("span", `swatch c${c.k} ${c.s} d${c.s === "line" ? c.k : 0}`), html("span", "", c.n), html("strong", "", text));
    view.tip.append(row);
  }
  view.tip.hidden = false;
  const left = place / view.width < 0.5;
  view.tip.style.left = left ? `${place + 14}px` : "auto";
  view.tip.style.right = left ? "auto" : `${view.canvas.clientWidth - place + 14}px`;
};
const pointAll = (x, speaker) => views.forEach((view) => point(view, x, view === speaker));

const zoom = (range) => {
  state.zoom = range;
  document.getElementById("reset").hidden = !range;
  drawAll();
};
const listenToPointer = (view) => {
  const { canvas } = view;
  const xAt = (event) => {
    const at = (event.clientX - canvas.getBoundingClientRect().left) * view.width / canvas.clientWidth;
    return view.xLow + (Math.min(Math.max(at, view.left), view.right) - view.left) / (view.right - view.left) * (view.xHigh - view.xLow);
  };
  let from = null;
  canvas.addEventListener("pointermove", (event) => {
    const x = xAt(event);
    pointAll(x, view);
    if (from !== null) {
      const a = view.px(Math.min(from, x)), b = view.px(Math.max(from, x));
      view.cross.append(svg("rect", { x: a, y: TOP - 6, width: b - a, height: view.bottom - TOP + 6, class: "brush" }));
    }
  });
  canvas.addEventListener("pointerleave", () => { if (from === null) pointAll(null); });
  canvas.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "mouse" && event.button === 0) { from = xAt(event); canvas.setPointerCapture(event.pointerId); }
  });
  canvas.addEventListener("pointerup", (event) => {
    const x = xAt(event), begun = from;
    from = null;
    if (begun !== null && Math.abs(view.px(x) - view.px(begun)) > 8) zoom([Math.min(begun, x), Math.max(begun, x)]);
  });
  canvas.addEventListener("pointercancel", () => { from = null; });
  canvas.addEventListener("dblclick", () => zoom(null));
};
const listenToKeys = (view) => {
  view.canvas.addEventListener("blur", () => pointAll(null));
  view.canvas.addEventListener("keydown", (event) => {
    const first = view.shown.find(({ on }) => on), keys = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 };
    if (event.key === "Escape") { pointAll(null); zoom(null); }
    if (!first || !(event.key in keys)) return;
    event.preventDefault();
    view.place = Math.min(Math.max((view.place ?? first.xs.length - 1 - keys[event.key]) + keys[event.key], 0), first.xs.length - 1);
    pointAll(first.xs[view.place], view);
  });
};

// -------------------------------------------------------------------------------------------------------- controls
const prepare = (figure) => {
  const chart = data.charts.find((c) => c.key === figure.dataset.key), canvas = figure.querySelector(".canvas");
  const title = figure.querySelector("h3").textContent;
  const view = { chart, canvas, hidden: new Set(), log: false, tip: html("div", "tip"), picture: svg("svg", { role: "img", "aria-label": title }) };
  view.tip.hidden = true;
  view.tip.setAttribute("role", "status");
  canvas.append(view.picture, view.tip);
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "group");
  canvas.setAttribute("aria-label", `${title}: arrow keys read values`);
  figure.querySelector("details.values").open = false;
  const log = figure.querySelector("button.log");
  if (!chart.curves.some((c) => c.y.some((y) => y > 0))) log.hidden = true;
  log.addEventListener("click", () => {
    view.log = !view.log;
    log.setAttribute("aria-pressed", view.log);
    draw(view);
  });
  for (const key of figure.querySelectorAll(".legend button")) key.addEventListener("click", () => {
    const index = Number(key.dataset.curve), hide = !view.hidden.has(index);
    if (hide) view.hidden.add(index); else view.hidden.delete(index);
    key.setAttribute("aria-pressed", !hide);
    draw(view);
  });
  views.push(view);
  listenToPointer(view);
  listenToKeys(view);
};
const prepareControls = () => {
  document.getElementById("axis").addEventListener("change", (event) => { state.axis = event.target.value; zoom(null); });
  document.getElementById("reset").addEventListener("click", () => zoom(null));
  const smoothing = document.getElementById("smoothing");
  smoothing.addEventListener("input", () => {
    state.share = [0, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.14, 0.2, 0.3, 0.4][smoothing.value];
    smoothing.nextElementSibling.textContent = state.share ? `${Math.round(100 * state.share)} %` : "off";
    drawAll();
  });
};
const prepareSettings = (table) => {
  const choice = document.getElementById("config-show"), filter = document.getElementById("config-filter");
  const update = () => {
    let group = null;
    for (const row of table.tBodies[0].rows) {
      if (row.classList.contains("group")) { group = row; row.hidden = true; continue; }
      const wanted = choice.value === "all" || row.classList.contains(choice.value);
      row.hidden = !(wanted && row.textContent.toLowerCase().includes(filter.value.trim().toLowerCase()));
      if (!row.hidden) group.hidden = false;
    }
  };
  choice.addEventListener("change", update);
  filter.addEventListener("input", update);
  if (![...table.tBodies[0].rows].some((row) => row.classList.contains(choice.value))) choice.value = "changed";
  update();
};

document.documentElement.classList.add("ready");  // before the first drawing: it gives the charts their width
document.querySelectorAll("figure[data-key]").forEach(prepare);
prepareControls();
if (document.getElementById("config-table")) prepareSettings(document.getElementById("config-table"));
let last = 0;
new ResizeObserver(() => {
  if (document.body.clientWidth !== last && !state.paper) { last = document.body.clientWidth; drawAll(); }
}).observe(document.body);
for (const [kind, paper] of [["beforeprint", true], ["afterprint", false]])  // paper has a width of its own, whatever the window's
  addEventListener(kind, () => { state.paper = paper; drawAll(); });
drawAll();
