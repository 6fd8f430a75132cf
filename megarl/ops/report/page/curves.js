// The curves: one Plotly chart per card, drawn when it comes near the window.

const COLORS = {
  light: ["#2f6fed", "#d9660a", "#14945a", "#a142d4", "#d93a3a", "#0b8fa8", "#a97d00", "#d6418f", "#5f6b80", "#7a5230"],
  dark: ["#7aa7ff", "#ff9d4d", "#4fd08c", "#cf94f7", "#ff8078", "#4cc9de", "#e8c04a", "#ff8dc4", "#a3adbf", "#c79a74"],
};
const DASHES = ["solid", "dot", "dash", "longdash", "dashdot"];
const curveView = { keep: 0, log: false, axis: "step", band: true };
const cards = [];

// Plotly interprets some HTML tags in labels; metric names may contain data sources, so escape them.
const label = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

const theme = () => isDark()
  ? { colors: COLORS.dark, text: "#9aa3b5", grid: "#282e3a", card: "#171b24" }
  : { colors: COLORS.light, text: "#5c6475", grid: "#e9ecf1", card: "#ffffff" };

// All lines of a chart: run, series and curve; colours identify runs in a comparison, and series in a single run.
function linesOf(chart) {
  const several = data.runs.length > 1, colors = theme().colors;
  return data.runs.flatMap((run, number) => chart.series.flatMap((series, index) => {
    const curve = curveOf(run, series.metric, curveView.axis);
    if (!curve || hiddenRuns.has(number)) return [];
    const color = colors[(several ? number : index) % colors.length];
    const dash = several ? DASHES[index % DASHES.length] : "solid";
    const name = !several ? series.label : chart.series.length > 1 ? `${run.name} · ${series.label}` : run.name;
    return [{ curve, color, dash, name, number, metric: series.metric }];
  }));
}

function lineTraces(line, kind) {
  const { curve, color, dash, name } = line, keep = kind === "points" ? 0 : curveView.keep;
  const mode = kind === "points" || curve.y.length < 3 ? "lines+markers" : "lines";
  const digits = "%{y:.4~g}<extra>%{fullData.name}</extra>";
  const base = { type: "scatter", x: curve.x, name: label(name), line: { color, width: 2, dash }, marker: { color, size: 7 }, hovertemplate: digits };
  const quiet = { showlegend: false, hoverinfo: "skip", hovertemplate: null };
  const traces = [];
  if (curve.low && curveView.band) {
    const edge = { ...base, ...quiet, mode: "lines", line: { width: 0, color } };
    traces.push({ ...edge, y: curve.low }, { ...edge, y: curve.high, fill: "tonexty", fillcolor: color + "22" });
  }
  if (!keep) return [...traces, { ...base, mode, y: curve.y }];
  if (!curve.low) traces.push({ ...base, ...quiet, y: curve.y, mode: "lines", opacity: 0.25, line: { color, width: 1 } });
  return [...traces, { ...base, y: smooth(curve.y, keep), mode: "lines" }];
}

// Ranks over steps, coloured by load relative to the mean of the step; white is balanced, on both themes.
function rankTraces(map) {
  const spread = Math.max(0.02, ...map.load.flat().map((load) => Math.abs(load - 1)));
  const scale = isDark() ? [[0, "#7aa7ff"], [0.5, "#171b24"], [1, "#ff9d4d"]] : [[0, "#2f6fed"], [0.5, "#ffffff"], [1, "#d9660a"]];
  return [{
    type: "heatmap", x: map.steps, y: map.ranks, z: map.load, zmin: 1 - spread, zmax: 1 + spread, colorscale: scale,
    text: map.load.map((row, number) => row.map((_, at) => describeLoad(map, number, at))),
    hovertemplate: "%{text}<extra></extra>", colorbar: { thickness: 10, len: 1, outlinewidth: 0, tickfont: { size: 11 } },
  }];
}

const rankMap = (chart) => data.runs[0].ranks[chart.series[0].metric];

function traces(chart) {
  if (chart.kind === "ranks") return rankTraces(rankMap(chart));
  const lines = linesOf(chart);
  if (chart.kind !== "stack") return lines.flatMap((line) => lineTraces(line, chart.kind));
  if (data.runs.length > 1) return comparedStack(chart, lines);
  return lines.map(({ curve, color, name }) => (
    { type: "bar", x: curve.x, y: curve.y, name: label(name), marker: { color, line: { width: 0 } }, hovertemplate: "%{y:.3~g} s<extra>%{fullData.name}</extra>" }
  ));
}

// With several runs, a stack would hide all but one: draw a bar per run with its mean seconds per phase.
function comparedStack(chart, lines) {
  const total = (curve) => curve.n * curve.y.reduce((sum, value) => sum + value, 0) / curve.y.length;
  const perStep = (line) => total(line.curve) / data.runs[line.number].final.steps; // a validation is not in every step
  const runs = [...new Set(lines.map((line) => line.number))], colors = theme().colors;
  return chart.series.map((series, index) => {
    const own = runs.map((number) => lines.find((line) => line.number === number && line.metric === series.metric));
    return {
      type: "bar", orientation: "h", name: label(series.label), y: runs.map((number) => label(data.runs[number].name)),
      x: own.map((line) => (line ? perStep(line) : null)), marker: { color: colors[index % colors.length], line: { width: 0 } },
      hovertemplate: "%{x:.3~g} s<extra>%{fullData.name}</extra>",
    };
  });
}

// Steps are whole numbers; longer axes have such labels anyway.
function stepAxis(curves) {
  const steps = curves.flatMap((curve) => [curve.x[0], curve.x[curve.x.length - 1]]);
  const low = Math.min(...steps), high = Math.max(...steps);
  return high - low < 8 ? wholeAxis(low, high) : {};
}

function layout(chart) {
  const { text, grid, card } = theme(), bars = chart.kind === "stack" && data.runs.length > 1;
  const axis = { gridcolor: grid, zeroline: false, linecolor: grid, tickfont: { color: text, size: 11 }, automargin: true };
  const curves = linesOf(chart).map((line) => line.curve), log = !bars && curveView.log && chart.kind !== "stack";
  const values = chart.kind === "stack" ? { rangemode: "tozero" } : log ? {} : valueAxis(curves, chart.share);
  const title = (words) => ({ title: { text: words, font: { size: 11 }, standoff: 4 } });
  return {
    margin: { l: 8, r: 8, t: 8, b: 8 },
    paper_bgcolor: "transparent", plot_bgcolor: "transparent",
    font: { family: "system-ui, sans-serif", color: text, size: 12 },
    hovermode: bars ? "closest" : "x unified", hoverdistance: -1, hoverlabel: { bgcolor: card, bordercolor: grid, namelength: -1 },
    barmode: "stack", bargap: 0.15,
    showlegend: chart.series.length * data.runs.length > 1,
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", traceorder: "normal", font: { size: 11 } },
    xaxis: { ...axis, showgrid: bars, ...(bars || curveView.axis === "time" ? {} : stepAxis(curves)), ...title(bars ? "seconds, mean of a step" : curveView.axis === "time" ? "hours of training" : "step") },
    yaxis: { ...axis, type: log ? "log" : undefined, ...values },
  };
}

function rankLayout(chart) {
  const base = layout(chart), { steps, ranks, each } = rankMap(chart), last = ranks[ranks.length - 1];
  const title = (text) => ({ title: { text, font: { size: 11 }, standoff: 4 } });
  return {
    ...base, hovermode: "closest", showlegend: false,
    xaxis: { ...base.xaxis, showgrid: false, ...stepAxis([{ x: steps }]), ...title("step") },
    yaxis: {
      ...base.yaxis, showgrid: false, type: "linear", ...wholeAxis(ranks[0], last), range: [ranks[0] - each / 2, last + each / 2], ...title("rank"),
    },
  };
}

function describeChart(chart) {
  if (chart.kind === "ranks") return describeRanks(rankMap(chart));
  return linesOf(chart).map((line) => describeCurve(line.name, line.curve)).join(". ") || "No values.";
}

function draw(card) {
  if (!window.Plotly) return;
  card.stale = false;
  const arranged = card.chart.kind === "ranks" ? rankLayout(card.chart) : layout(card.chart);
  Plotly.react(card.plot, traces(card.chart), arranged, { displayModeBar: false, responsive: true });
  card.plot.setAttribute("aria-label", `${card.chart.title}. ${describeChart(card.chart)}`);
}

function redraw() {
  for (const card of cards) {
    card.stale = true;
    if (card.near) draw(card);
  }
}

// Draw cards near the window at once and the others on demand, so that a hundred charts open fast.
const watcher = new IntersectionObserver((entries) => entries.forEach(({ target, isIntersecting }) => {
  const card = cards.find((one) => one.plot === target);
  card.near = isIntersecting;
  if (isIntersecting && card.stale) draw(card);
}), { rootMargin: "600px" });

function drawEverything() {
  cards.filter((card) => card.stale).forEach(draw);
}

// Arrow keys move along the focused chart, like the mouse.
function moveAlong(card, event) {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!by || card.chart.kind === "stack" && data.runs.length > 1) return;
  const shown = card.plot.data.map((trace, number) => ({ trace, number })).filter(({ trace }) => trace.hoverinfo !== "skip");
  if (!shown.length) return;
  const { x } = shown[0].trace;
  card.at = Math.max(0, Math.min(x.length - 1, (card.at ?? (by > 0 ? -1 : x.length)) + by));
  event.preventDefault();
  if (card.chart.kind === "ranks") { // of each step the busiest rank
    const map = rankMap(card.chart), row = busiestRow(map, card.at);
    Plotly.Fx.hover(card.plot, [{ curveNumber: 0, pointNumber: [row, card.at] }]);
    find("spoken").textContent = describeLoad(map, row, card.at);
    return;
  }
  const points = shown.map(({ trace, number }) => ({ curveNumber: number, pointNumber: trace.x.indexOf(x[card.at]) }))
    .filter((point) => point.pointNumber >= 0);
  Plotly.Fx.hover(card.plot, points);
  find("spoken").textContent = `${formatNumber(x[card.at])}: ` + points.map(({ curveNumber, pointNumber }) => {
    const trace = card.plot.data[curveNumber];
    return `${trace.name} ${formatNumber(trace.y[pointNumber])}`;
  }).join(", ");
}

function chartCard(chart, parent) {
  const box = element("div", chart.wide ? "chart wide" : "chart"), plot = element("div", "plot");
  box.append(element("h4", "", chart.title), element("p", "quiet", chart.note), plot);
  box.dataset.names = [chart.title, chart.note, ...chart.series.flatMap((series) => [series.metric, series.label])].join(" ").toLowerCase();
  plot.tabIndex = 0;
  plot.setAttribute("role", "img");
  plot.setAttribute("aria-label", chart.title);
  parent.append(box);
  const card = { chart, plot, box, stale: true, near: false };
  plot.addEventListener("keydown", (event) => moveAlong(card, event));
  plot.addEventListener("blur", () => { if (window.Plotly && plot.data) Plotly.Fx.unhover(plot); card.at = undefined; });
  cards.push(card);
  watcher.observe(plot);
  return card;
}

function setUpCurves() {
  for (const group of data.groups) {
    const section = element("div", "group");
    section.append(element("h3", "", group.title));
    const grid = element("div", "charts");
    section.append(grid);
    find("charts").append(section);
    group.charts.forEach((chart) => chartCard(chart, grid));
  }
  const names = [...new Set(data.runs.flatMap((run) => Object.keys(run.metrics)))].sort();
  if (!names.length) {
    find("charts").append(element("p", "empty", "No metrics were logged."));
    return;
  }
  anyMetric(names);
  const controls = { smoothing: "input", log: "change", axis: "change", "chart-search": "input" };
  for (const [id, event] of Object.entries(controls)) find(id).addEventListener(event, readControls);
  readControls();
  window.addEventListener("beforeprint", drawEverything);
}

function readControls() {
  Object.assign(curveView, { keep: Number(find("smoothing").value), log: find("log").checked, axis: find("axis").value });
  find("smoothing-value").textContent = curveView.keep.toFixed(2);
  const words = queryWords(find("chart-search").value);
  for (const card of cards) card.box.hidden = !words.every((word) => card.box.dataset.names.includes(word));
  for (const group of document.querySelectorAll(".group")) group.hidden = !group.querySelector(".chart:not([hidden])");
  redraw();
}

function anyMetric(names) {
  const any = (name) => ({ title: "Any metric", note: "", kind: "line", wide: true, series: [{ metric: name, label: name }] });
  const section = element("div", "group"), grid = element("div", "charts");
  section.append(grid);
  find("charts").append(section);
  const card = chartCard(any(names[0]), grid), choice = element("select");
  card.box.dataset.names += ` ${names.join(" ").toLowerCase()}`;
  choice.id = "any-metric";
  choice.setAttribute("aria-label", "Metric");
  choice.append(...names.map((name) => new Option(name, name)));
  choice.addEventListener("change", () => { card.chart = any(choice.value); draw(card); });
  card.box.querySelector("p").replaceWith(choice);
  showMetric = (name) => {
    choice.value = name;
    card.chart = any(name);
    find("chart-search").value = "";
    readControls();
    draw(card);
    card.box.scrollIntoView({ block: "center" });
    card.plot.focus({ preventScroll: true });
  };
}

let showMetric = () => {};
