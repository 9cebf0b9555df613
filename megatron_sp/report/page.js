// Draws the charts again for the width there is, and lets one look at values: crosshair, logarithmic axis, smoothing, zoom, other axes.
// The page is whole without it. Texts of the run go through textContent and setAttribute only.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const LEFT = 62, RIGHT = 14, TOP = 18, BOTTOM = 26, SMOOTHED_FROM = 150, UNDONE_DOTS = 40;
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

  // ------------------------------------------------------------------------------------------------------ numbers
  const digits = (value, count) => String(Number(value.toPrecision(count)));
  const si = (value) => {
    for (const [unit, size] of [[" T", 1e12], [" G", 1e9], [" M", 1e6], [" k", 1e3]])
      if (Math.abs(value) >= size) return digits(value / size, 3) + unit;
    return digits(value, 3);
  };
  const bytes = (value) => {
    for (const unit of ["B", "KiB", "MiB", "GiB"]) {
      if (Math.abs(value) < 1024) return (unit === "B" ? value.toFixed(0) : value.toFixed(1)) + " " + unit;
      value /= 1024;
    }
    return value.toFixed(1) + " TiB";
  };
  const show = (value, kind, tick) => {
    if (value === null || !Number.isFinite(value)) return "–";
    if (tick && value === 0) return "0";
    if (tick && (kind === "bytes" || kind === "percent")) return show(value, kind, false).replace(".0 ", " ");
    if (kind === "loss" && !tick) return Math.abs(value) < 1e4 ? value.toFixed(4) : digits(value, 4);
    if (kind === "si") return si(value);
    if (kind === "bytes") return bytes(value);
    if (kind === "percent") return (100 * value).toFixed(1) + " %";
    if (kind === "count") return value.toLocaleString("en-US", { maximumFractionDigits: 0 });
    if (kind === "seconds") return value < 1 ? digits(1e3 * value, 3) + " ms" : digits(value, 3) + " s";
    const size = Math.abs(value);
    return size && (size < 1e-4 || size >= 1e6) ? value.toExponential(tick ? 1 : 3) : digits(value, tick ? 4 : 5);
  };
  const axisText = (x, tick) => {
    if (state.axis === "tokens") return tick ? si(x) : si(x) + " tokens";
    if (state.axis === "step") return tick ? x.toLocaleString("en-US", { maximumFractionDigits: 0 }) : "step " + x.toLocaleString("en-US");
    return x < 3 ? digits(60 * x, 3) + " s" : x < 180 ? digits(x, 3) + " min" : digits(x / 60, 3) + " h";
  };

  // --------------------------------------------------------------------------------------------------------- axes
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
  const ticks = (low, high, count, unit = 1) => {
    const raw = (high - low) / count / unit, size = 10 ** Math.floor(Math.log10(raw));
    const step = unit * size * ([1, 2, 2.5, 5, 10].find((m) => m * size >= raw * 0.999) || 10);
    const found = [];
    if (!(step > 0) || !Number.isFinite(step)) return [low];
    for (let i = Math.ceil(low / step - 1e-9); i <= high / step + 1e-9; i++) found.push(Number((i * step).toPrecision(12)));
    return found;
  };
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
  const smoothed = (values, share) => {  // a mean over as many to either side, as in run_history.smoothed
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

  // ------------------------------------------------------------------------------------------------------ drawing
  const draw = (view) => {
    const { chart, canvas } = view, height = chart.h;
    const width = state.paper ? (canvas.parentElement.classList.contains("wide") ? 1000 : 490) : Math.max(260, canvas.clientWidth);
    const right = width - RIGHT, bottom = height - BOTTOM;
    const shown = chart.curves.map((c, i) => ({ c, xs: c.x.map((x) => xOf(c.r, x)), on: !view.hidden.has(i) }));
    let xLow = Infinity, xHigh = -Infinity;
    if (state.zoom) [xLow, xHigh] = state.zoom;
    else for (const { xs } of shown) for (const x of xs) if (Number.isFinite(x)) { xLow = Math.min(xLow, x); xHigh = Math.max(xHigh, x); }
    if (!(xHigh > xLow)) { const at = Number.isFinite(xLow) ? xLow : 0; xLow = at - 1; xHigh = at + 1; }
    const usable = (y) => y !== null && (!view.log || y > 0);
    let low = Infinity, high = -Infinity;
    for (const { c, xs, on } of shown) if (on) c.y.forEach((y, i) => {
      if (usable(y) && xs[i] >= xLow && xs[i] <= xHigh) { low = Math.min(low, y); high = Math.max(high, y); }
    });
    for (const [y] of chart.levels) if (usable(y)) { low = Math.min(low, y); high = Math.max(high, y); }
    if (!Number.isFinite(low)) { low = view.log ? 1 : 0; high = view.log ? 10 : 1; }
    if (chart.zero && !view.log && !state.zoom) { low = Math.min(0, low); high = Math.max(0, high); }
    const scale = view.log ? Math.log10 : (y) => y;
    let yLow = scale(low), yHigh = scale(high);
    const pad = 0.05 * (yHigh - yLow) || (view.log ? 0.5 : 0.5 * Math.abs(yHigh) || 1);
    yLow = chart.zero && !view.log && low === 0 ? 0 : yLow - pad;
    yHigh += pad;
    const px = (x) => LEFT + (x - xLow) / (xHigh - xLow) * (right - LEFT);
    const py = (y) => bottom - (scale(y) - yLow) / (yHigh - yLow) * (bottom - TOP);
    const plot = svg("g", { class: "plot" });
    const unit = chart.kind === "bytes" && yHigh >= 1 ? 1024 ** Math.floor(Math.log(yHigh) / Math.log(1024)) : 1;  // bytes go by 1024
    for (const y of view.log ? logTicks(yLow, yHigh) : ticks(yLow, yHigh, height > 300 ? 6 : 4, unit)) {
      plot.append(svg("line", { x1: LEFT, x2: right, y1: py(y), y2: py(y), class: "grid" }));
      plot.append(svg("text", { x: LEFT - 8, y: py(y) + 4, class: "tick end" }, show(y, chart.kind, true)));
    }
    for (const x of ticks(xLow, xHigh, Math.max(2, Math.floor(width / 110))))
      plot.append(svg("text", { x: px(x) > right - 24 ? right : px(x), y: bottom + 17, class: px(x) > right - 24 ? "tick end" : "tick mid" }, axisText(x, true)));
    const clip = `clip-${chart.key}`, inner = svg("g", { "clip-path": `url(#${clip})` }), shape = svg("clipPath", { id: clip });
    shape.append(svg("rect", { x: LEFT - 4, y: 0, width: right - LEFT + 8, height: bottom + 3 }));
    plot.append(shape, inner);
    for (const [step, run] of data.resumed) {
      const x = px(xOf(run, step));
      if (x >= LEFT && x <= right) inner.append(svg("line", { x1: x, x2: x, y1: TOP - 6, y2: bottom, class: `resume c${run % 6}` }));
    }
    for (const [y, text] of chart.levels) if (usable(y)) {
      inner.append(svg("line", { x1: LEFT, x2: right, y1: py(y), y2: py(y), class: "level" }));
      inner.append(svg("text", { x: right, y: py(y) - 5, class: "tick end level-text" }, text));
    }
    const path = (xs, ys) => {
      let pen = "M", words = "";
      ys.forEach((y, i) => {
        if (usable(y) && Number.isFinite(xs[i])) { words += pen + px(xs[i]).toFixed(1) + " " + py(y).toFixed(1); pen = "L"; } else pen = "M";
      });
      return words;
    };
    for (const { c, xs, on } of shown) {
      if (!on) continue;
      const look = `c${c.k} ${c.s}`, smooth = chart.noisy && c.s === "line" && c.y.length >= SMOOTHED_FROM && state.share > 0;
      inner.append(svg("path", { d: path(xs, c.y), class: look + (smooth ? " faint" : c.s === "line" ? ` d${c.k}` : "") }));
      if (smooth) {
        const x = c.mx ? c.mx.map((v) => xOf(c.r, v)) : xs;
        inner.append(svg("path", { d: path(x, smoothed(c.my || c.y, state.share)), class: `${look} d${c.k}` }));
      }
      const lone = (i) => c.y[i] !== null && (c.y[i - 1] ?? null) === null && (c.y[i + 1] ?? null) === null;
      const dots = c.y.map((_, i) => i).filter((i) => usable(c.y[i]) && Number.isFinite(xs[i]) && (c.s !== "line" || lone(i)));
      if (dots.length <= (c.s === "undone" ? UNDONE_DOTS : 300))
        for (const i of dots) inner.append(svg("circle", { cx: px(xs[i]), cy: py(c.y[i]), r: c.s === "undone" ? 2.5 : 3.5, class: `${look} dot` }));
      for (const [step] of c.bad || []) {
        const x = px(xOf(c.r, step));
        if (x >= LEFT && x <= right) inner.append(svg("path", { d: `M${x} ${TOP - 1}l-5 -9h10z`, class: "bad" }));
      }
    }
    if (!shown.length) plot.append(svg("text", { x: width / 2, y: height / 2, class: "tick mid" }, "nothing was logged"));
    view.cross = svg("g", { class: "marks" });
    plot.append(view.cross);
    const picture = canvas.querySelector("svg");
    picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
    picture.querySelector("g.plot").replaceWith(plot);
    Object.assign(view, { shown, px, py, xLow, xHigh, right, bottom, width, usable });
  };
  const drawAll = () => views.forEach(draw);

  // ---------------------------------------------------------------------------------------------------- crosshair
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
      rows.push([c, (bad ? bad[1] : show(c.y[i], view.chart.kind)) + (xs[i] === at ? "" : ` (${axisText(xs[i])})`)]);
      if (view.usable(c.y[i])) view.cross.append(svg("circle", { cx: view.px(xs[i]), cy: view.py(c.y[i]), r: 4.5, class: `c${c.k} ${c.s} dot` }));
    }
    const place = view.px(at ?? x);
    view.cross.prepend(svg("line", { x1: place, x2: place, y1: TOP - 6, y2: view.bottom, class: "cross" }));
    if (!speaks || !rows.length) return;
    view.tip.replaceChildren(html("b", "", axisText(at ?? x)));
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
  const listen = (view) => {
    const { canvas } = view;
    const xAt = (event) => {
      const at = (event.clientX - canvas.getBoundingClientRect().left) * view.width / canvas.clientWidth;
      return view.xLow + (Math.min(Math.max(at, LEFT), view.right) - LEFT) / (view.right - LEFT) * (view.xHigh - view.xLow);
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
    const done = (event) => {
      const x = xAt(event), begun = from;
      from = null;
      if (begun !== null && Math.abs(view.px(x) - view.px(begun)) > 8) zoom([Math.min(begun, x), Math.max(begun, x)]);
    };
    canvas.addEventListener("pointerup", done);
    canvas.addEventListener("pointercancel", () => { from = null; });
    canvas.addEventListener("dblclick", () => zoom(null));
    canvas.addEventListener("blur", () => pointAll(null));
    canvas.addEventListener("keydown", (event) => {
      const first = view.shown.find(({ on }) => on), keys = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 };
      if (event.key === "Escape") { pointAll(null); zoom(null); }
      if (!first || !(event.key in keys)) return;
      event.preventDefault();
      view.place = Math.min(Math.max((view.place ?? first.xs.length - 1 - keys[event.key]) + keys[event.key], 0), first.xs.length - 1);
      pointAll(first.xs[view.place], view);
    });
  };

  // ----------------------------------------------------------------------------------------------------- controls
  for (const figure of document.querySelectorAll("figure[data-key]")) {
    const chart = data.charts.find((c) => c.key === figure.dataset.key), canvas = figure.querySelector(".canvas");
    const view = { chart, canvas, hidden: new Set(), log: false, tip: html("div", "tip") };
    view.tip.hidden = true;
    view.tip.setAttribute("role", "status");
    canvas.append(view.tip);
    const picture = canvas.querySelector("svg"), title = picture.querySelector("title");
    picture.setAttribute("aria-label", title.textContent);  // a title element would show itself over our own tooltip
    picture.setAttribute("aria-labelledby", picture.querySelector("desc").id);
    title.remove();
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
    listen(view);
  }
  document.getElementById("axis").addEventListener("change", (event) => { state.axis = event.target.value; zoom(null); });
  document.getElementById("reset").addEventListener("click", () => zoom(null));
  const smoothing = document.getElementById("smoothing");
  smoothing.addEventListener("input", () => {
    state.share = [0, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.14, 0.2, 0.3, 0.4][smoothing.value];
    smoothing.nextElementSibling.textContent = state.share ? `${Math.round(100 * state.share)} %` : "off";
    drawAll();
  });
  const table = document.getElementById("config-table");
  if (table) {
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
  }
  let last = 0;
  new ResizeObserver(() => {
    if (document.body.clientWidth !== last && !state.paper) { last = document.body.clientWidth; drawAll(); }
  }).observe(document.body);
  for (const [kind, paper] of [["beforeprint", true], ["afterprint", false]])  // paper has a width of its own, whatever the window's
    addEventListener(kind, () => { state.paper = paper; drawAll(); });
  document.documentElement.classList.add("ready");
  drawAll();
})();
