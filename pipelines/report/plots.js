// The plots one can hover and zoom. plotly's text is run when the first of them comes into view; each is drawn when it does.

const plots = new Map();
const isTouch = matchMedia("(pointer: coarse)").matches;

function plotly() {
  if (!window.Plotly) document.body.append(Object.assign(document.createElement("script"), { textContent: byId("plotly").textContent }));
  return window.Plotly;
}

const watcher = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    plots.get(target).isNear = isIntersecting;
    if (isIntersecting) drawIfStale(target);
  }
}, { rootMargin: "400px" });

// `build` gives {data, layout} or null when there is nothing to draw. `data-drawn` of a host tells whether its plot shows what is
// chosen now (yes), shows what was (stale), or is none.
function registerPlot(host, build) {
  plots.set(host, { build, isStale: true, isNear: false });
  watcher.observe(host);
}

function drawIfStale(host) {
  const plot = plots.get(host);
  if (!plot.isStale || document.readyState === "loading" || host.clientWidth < 80) return;
  plot.isStale = false;
  const figure = plot.build(host);
  host.classList.toggle("empty", !figure);
  if (!figure) {
    delete host.dataset.drawn;
    if (host.classList.contains("js-plotly-plot")) plotly().purge(host);
    host.replaceChildren(el("p", null, "Nothing to plot here."));
    return;
  }
  const isNew = !host.classList.contains("js-plotly-plot");
  if (isNew) host.replaceChildren();
  plotly().react(host, figure.data, baseLayout(host, figure.layout), {
    displaylogo: false, responsive: true, scrollZoom: false,
    modeBarButtons: [["zoom2d", "pan2d", "resetScale2d", "toImage"]],
    toImageButtonOptions: { format: "png", scale: 2, filename: `bayplan-${host.dataset.name}` },
  });
  plot.start = figure.layout.xaxis.range?.[0];
  if (isNew) followZoom(host);
  host.dataset.drawn = "yes";
}

function markStale(host) {
  plots.get(host).isStale = true;
  if (host.dataset.drawn) host.dataset.drawn = "stale";
}

function redraw(hosts = plots.keys()) {
  for (const host of hosts) {
    markStale(host);
    if (plots.get(host).isNear) drawIfStale(host);
  }
}

// A colour of the page as plotly needs it: resolved for the theme of this moment.
function ink(name, alpha = 1) {
  const probe = byId("probe") || document.body.appendChild(el("span", { id: "probe", hidden: true }));
  probe.style.color = `var(--${name})`;
  const [r, g, b] = getComputedStyle(probe).color.match(/[\d.]+/g);
  return `rgba(${r}, ${g}, ${b}, ${alpha})`;
}

function baseLayout(host, layout) {
  const axis = {
    gridcolor: ink("line"), linecolor: ink("line-strong"), zeroline: false, ticks: "outside", tickcolor: ink("line-strong"), ticklen: 4,
    tickfont: { size: 11.5, color: ink("muted") }, title: { font: { size: 12, color: ink("muted") }, standoff: 8 },
  };
  const merge = (own = {}) => ({ ...axis, ...own, title: { ...axis.title, ...own.title } });
  return {
    autosize: true, height: host.clientHeight, margin: { l: 54, r: 14, t: 14, b: 44 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: ink("ink") }, showlegend: false,
    hoverlabel: { bgcolor: ink("raised"), bordercolor: ink("line-strong"), font: { color: ink("ink"), size: 12.5 }, align: "left" },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: ink("muted"), activecolor: ink("ink") },
    dragmode: isTouch ? false : "zoom", bargap: 0.25, ...layout,
    xaxis: merge(layout.xaxis), yaxis: merge({ fixedrange: true, ticks: "", showline: false, ...layout.yaxis }),
  };
}

const range = (low, high) => (high - low <= 1 ? exact(low) : `${exact(low)} – ${exact(high - 1)}`);

// The share of everything in each cell, as a step line that is filled; hover tells counts.
function stepTraces(distribution, edges, hue, { unit, thing, show = range, scale = 1, ghost = null }) {
  const outline = (own, total) => {
    const x = [], y = [];
    own.forEach((count, cell) => { x.push(edges[cell] / scale); y.push(count / total); });
    return { x: [x[0], ...x, edges.at(-1) / scale], y: [0, ...y, 0] };
  };
  const counts = regroup(distribution.histogram, edges);
  const traces = [];
  const line = { type: "scatter", mode: "lines", hoverinfo: "skip" };
  if (ghost) traces.push({ ...line, ...outline(regroup(ghost.histogram, edges), ghost.count), line: { shape: "hv", width: 1.2, color: ink("muted", 0.75), dash: "dot" } });
  traces.push({ ...line, ...outline(counts, distribution.count), fill: "tozeroy", fillcolor: ink(hue, 0.28), line: { shape: "hv", width: 1.4, color: ink(hue) } });
  const text = [], x = [], y = [];
  counts.forEach((count, cell) => {
    if (!count) return;
    x.push(Math.sqrt(edges[cell] * edges[cell + 1]) / scale);
    y.push(count / distribution.count);
    text.push(`<b>${show(edges[cell], edges[cell + 1])}</b> ${unit}<br>${plural(count, thing)}, ${percent(count / distribution.count)}`);
  });
  traces.push({ type: "scatter", mode: "markers", x, y, text, hovertemplate: "%{text}<extra></extra>", marker: { color: ink(hue), size: 7, opacity: 0 } });
  return traces;
}

// 1k, 2k, 5k, 10k: as many as there is room for. plotly's own ticks, used once one zooms, crowd a short axis.
function logTicks(low, high, width) {
  const decades = Array.from({ length: Math.ceil(Math.log10(high)) - Math.floor(Math.log10(low)) + 1 }, (_, place) => 10 ** (Math.floor(Math.log10(low)) + place));
  const sets = [[1, 1.5, 2, 3, 4, 5, 7], [1, 2, 5], [1, 3], [1]];
  const ticks = sets.map((digits) => decades.flatMap((decade) => digits.map((digit) => digit * decade)).filter((value) => value >= low && value <= high));
  const tickvals = ticks.find((values) => values.length * 44 <= width) || ticks.at(-1);
  return { tickvals, ticktext: tickvals.map((value) => (value < 1000 ? exact(value) : human(value).replace(" ", ""))) };
}

function followZoom(host) {
  host.on("plotly_relayout", () => {
    const { type, range, tickmode } = host.layout.xaxis;
    const wanted = Math.abs(range?.[0] - plots.get(host)?.start) < 1e-6 ? "array" : "auto";
    if (type === "log" && (tickmode || "array") !== wanted) plotly().relayout(host, { "xaxis.tickmode": wanted });
  });
}

function logFigure(host, distribution, whole, hue, options) {
  const domain = domainOf(whole);
  if (!domain || !distribution.count || !domainOf(distribution)) return null;
  const edges = logEdges(domain[0], domain[1], 56);
  const lines = (options.lines || []).filter((value) => value > domain[0] / 2 && value < domain[1] * 4);
  const right = Math.max(edges.at(-1), ...lines.map((value) => value * 1.15));
  const scale = options.scale || 1;
  return {
    data: stepTraces(distribution, edges, hue, { ...options, ghost: distribution === whole ? null : whole }),
    layout: {
      hovermode: "x", hoverdistance: 40,
      xaxis: { type: "log", range: [Math.log10((edges[0] / scale) * 0.97), Math.log10((right / scale) * 1.02)], tickformat: "~s", tickangle: 0, ...logTicks(edges[0] / scale, right / scale, host.clientWidth - 68), title: { text: options.axis }, ...options.xaxis },
      yaxis: { tickformat: ".0~%", rangemode: "tozero", nticks: 5, ticklabelstandoff: 6 },
      shapes: lines.map((value) => ({ type: "line", x0: value, x1: value, yref: "paper", y0: 0, y1: 1, line: { color: ink("alert"), width: 1, dash: "dash" } })),
      annotations: lines.filter((value, place) => !lines.some((other, k) => k > place && other < 2.5 * value)).map((value) => ({ x: Math.log10(value), xref: "x", yref: "paper", y: 1, yanchor: "top", xanchor: "right", xshift: -3, showarrow: false, text: exact(value), font: { size: 11, color: ink("alert") } })),
    },
  };
}

// Whole counts from zero: 0, 1, 2, 3, 4, 5–8, 9–16, ...
function countFigure(host, distribution, whole, hue, { thing, axis }) {
  if (!distribution.count) return null;
  const high = Math.max(...whole.histogram.map(([, end]) => end));
  const edges = [0, 1, 2, 3, 4, 5];
  while (edges.at(-1) < high) edges.push((edges.at(-1) - 1) * 2 + 1);
  const counts = regroup(distribution.histogram, edges);
  const names = counts.map((_, cell) => (edges[cell + 1] - edges[cell] === 1 ? `${edges[cell]}` : `${edges[cell]}–${edges[cell + 1] - 1}`));
  const y = counts.map((count) => count / distribution.count);
  const text = counts.map((count, cell) => `<b>${names[cell]}</b> ${axis}<br>${plural(count, thing)}, ${percent(y[cell])}`);
  const data = [{ type: "bar", x: names, y, text, textposition: "none", hovertemplate: "%{text}<extra></extra>", marker: { color: ink(hue, 0.55), line: { width: 1, color: ink(hue) } } }];
  if (distribution !== whole) {
    const ghost = regroup(whole.histogram, edges).map((count) => count / whole.count);
    data.push({ type: "scatter", mode: "markers", x: names, y: ghost, hoverinfo: "skip", marker: { symbol: "line-ew-open", size: 16, color: ink("muted"), line: { width: 1.5 } } });
  }
  return { data, layout: { xaxis: { type: "category", title: { text: axis }, fixedrange: true, tickangle: 0, showgrid: false, ...(isNarrow(host) ? { tickfont: { size: 9.5, color: ink("muted") } } : {}) }, yaxis: { tickformat: ".0~%", nticks: 5, rangemode: "tozero", ticklabelstandoff: 6 } } };
}

const SIDES = [16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768];
const isNarrow = (host) => host.clientWidth < 430;

// Bricks of unequal sides on two logarithmic axes, as dark as they are full.
function sizeFigure(host, cells) {
  if (!cells.length) return null;
  const edgesOf = (low, high) => [...new Set(cells.flatMap((cell) => [Math.max(1, cell[low]), cell[high]]))].sort((a, b) => a - b);
  const [xs, ys] = [edgesOf(0, 1), edgesOf(2, 3)];
  const empty = () => ys.slice(1).map(() => xs.slice(1).map(() => null));
  const [z, text] = [empty(), empty()];
  const total = cells.reduce((sum, cell) => sum + cell[4], 0);
  for (const [left, right, low, high, count] of cells) {
    const label = `<b>${range(left, right)}</b> wide, <b>${range(low, high)}</b> high<br>${plural(count, "image")}, ${percent(count / total)}`;
    for (let row = ys.indexOf(Math.max(1, low)); ys[row] < high; row += 1) {
      for (let column = xs.indexOf(Math.max(1, left)); xs[column] < right; column += 1) {
        z[row][column] = Math.log10(count);
        text[row][column] = label;
      }
    }
  }
  const top = Math.log10(Math.max(...cells.map((cell) => cell[4])));
  const ticks = Array.from({ length: Math.floor(top) + 1 }, (_, power) => power).filter((power) => top <= 5 || power % 2 === 0);
  const log = (values) => values.map((value) => Math.log10(value));
  const named = SIDES.filter((_, place) => !isNarrow(host) || place % 2 === 0);
  const sides = { tickvals: log(named), ticktext: named.map((side) => exact(side)), tickangle: 0 };
  const both = [Math.max(xs[0], ys[0]), Math.min(xs.at(-1), ys.at(-1))].map((value) => Math.log10(value));
  return {
    data: [{
      type: "heatmap", x: log(xs), y: log(ys), z, text, hovertemplate: "%{text}<extra></extra>", hoverongaps: false, zmin: 0, zmax: Math.max(top, 1), xgap: 1, ygap: 1,
      colorscale: [[0, ink("image-pale")], [0.5, ink("image")], [1, ink("image-deep")]],
      colorbar: { thickness: 8, outlinewidth: 0, len: 0.9, tickvals: ticks, ticktext: ticks.map((power) => human(10 ** power)), tickfont: { size: 11, color: ink("muted") }, title: { text: "images", side: "right", font: { size: 11, color: ink("muted") } } },
    }],
    layout: {
      margin: { l: 58, r: 8, t: 14, b: 44 }, xaxis: { ...sides, title: { text: "width, pixels" } }, yaxis: { ...sides, fixedrange: false, title: { text: "height, pixels" } },
      shapes: [{ type: "line", x0: both[0], y0: both[0], x1: both[1], y1: both[1], line: { color: ink("ink", 0.45), width: 1, dash: "dot" } }],
    },
  };
}

// What every source is and what the mixture makes of it: a hollow and a full dot on one line.
function mixtureFigure(host, rows) {
  if (!rows.length) return null;
  const names = rows.map(([name]) => forPlotly(shortened(visible(name), isNarrow(host) ? 13 : 34)));
  const at = rows.map((_, place) => place);
  const text = rows.map(([name, own, drawn]) => `<b>${forPlotly(shortened(visible(name), 60))}</b><br>${percent(own)} of the data${drawn === null ? "" : `<br>${percent(drawn)} of the mixture`}`);
  const links = { x: [], y: [] };
  rows.forEach(([, own, drawn], place) => { if (drawn !== null) { links.x.push(own, drawn, null); links.y.push(place, place, null); } });
  const dots = { type: "scatter", mode: "markers", y: at, text, hovertemplate: "%{text}<extra></extra>" };
  return {
    data: [
      { type: "scatter", mode: "lines", ...links, hoverinfo: "skip", line: { color: ink("line-strong"), width: 2 }, showlegend: false },
      { ...dots, name: "data", x: rows.map(([, own]) => own), marker: { size: 9, color: ink("surface"), line: { width: 1.8, color: ink("muted") } } },
      { ...dots, name: "mixture", x: rows.map(([, , drawn]) => drawn), marker: { size: 9, color: ink("accent") } },
    ],
    layout: {
      margin: { l: isNarrow(host) ? 100 : 240, r: 18, t: 30, b: 40 }, hovermode: "closest", showlegend: true,
      legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom", font: { size: 12, color: ink("muted") } },
      xaxis: { tickformat: ".1~%", rangemode: "tozero", title: { text: "share of tokens" } },
      yaxis: { tickvals: at, ticktext: names, range: [rows.length - 0.4, -0.6], showgrid: true, tickfont: { size: 12, color: ink("ink") }, ticklabelstandoff: 8 },
    },
  };
}
