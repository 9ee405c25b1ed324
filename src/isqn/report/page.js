"use strict";
// Draws the charts of the page, and shows or hides their series.

const data = JSON.parse(document.getElementById("data").textContent);
const chartElements = [...document.querySelectorAll(".chart")];
const buttons = [...document.querySelectorAll(".toggles button")];
const isTouch = matchMedia("(pointer: coarse)").matches; // dragging on a touch screen scrolls the page and must not zoom
const SEEDS = ""; // name of the button for the seeds behind intervals
const GREY = "#5b6470";
const FONT = getComputedStyle(document.body).fontFamily;

// Escape a text and wrap it. Plotly would interpret tags, formulas and templates in it.
function escapeText(text, length = 36) {
  const lines = text.replace(new RegExp(`(.{1,${length}})(?:\\s+|$)`, "g"), "$1\n").trim().split("\n");
  return lines.map((line) => line.replace(/[&<>$%]/g, (letter) => `&#${letter.charCodeAt(0)};`)).join("<br>");
}

function formatNumber(value) {
  if (value === null) return "–";
  const rounded = Number(value.toPrecision(Math.abs(value) < 1000 ? 4 : 15));
  const text = Math.abs(value) < 1000 ? String(rounded) : Math.round(rounded).toLocaleString("en");
  return text.replace("-", "−");
}

// Format the number of a bar so that the largest has about three digits: 1.06 and 0.03, 43.2, 12.4k.
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
function formatShort(value, largest) {
  const rounded = Number(largest.toPrecision(3));
  if (rounded >= 1000) return compact.format(value).replace("K", "k").replace("-", "−");
  if (rounded < 0.1) return formatNumber(Number(value.toPrecision(3)));
  return value.toFixed(rounded < 10 ? 2 : rounded < 100 ? 1 : 0).replace("-", "−");
}

function formatInterval({ low, high }, i) {
  return low && high && low[i] !== null && high[i] !== null ? `[${formatNumber(low[i])}, ${formatNumber(high[i])}]` : "";
}

// Return the outline of the interval: one closed shape for each stretch without gaps.
function bandOutline({ x, low, high }) {
  const outline = { x: [], y: [] };
  const add = (i, edge) => (outline.x.push(x[i]), outline.y.push(edge[i]));
  let start = 0;
  for (let i = 0; i <= x.length; i++) {
    if (i < x.length && low[i] !== null && high[i] !== null) continue;
    for (let j = start; j < i; j++) add(j, high);
    for (let j = i - 1; j >= start; j--) add(j, low);
    if (i > start) outline.x.push(null), outline.y.push(null);
    start = i + 1;
  }
  return outline;
}

// `meta` has the names of the buttons that control a trace. It is visible while all of them are on.
function lineTraces(chart) {
  const bands = [], seeds = [], means = [];
  for (const series of chart.series) {
    const { label, colour, dash, x, y } = series;
    const noHover = { type: "scatter", mode: "lines", hoverinfo: "skip" };
    const hasBand = series.low && series.high;
    if (hasBand)
      bands.push({ ...noHover, ...bandOutline(series), meta: [label], fill: "toself", fillcolor: `${colour}26`, line: { width: 0 } });
    if (series.seeds)
      seeds.push({
        ...noHover,
        meta: hasBand ? [label, SEEDS] : [label],
        x: series.seeds.flatMap(() => [...x, null]),
        y: series.seeds.flatMap((seed) => [...seed, null]),
        line: { color: `${colour}59`, width: 0.8 },
      });
    const isGap = (i) => (y[i] ?? null) === null;
    // Every point of a short line has a marker, and so has a point between two gaps, which would be invisible.
    const marked = y.map((_, i) => !isGap(i) && ((chart.ticks && !series.level) || (isGap(i - 1) && isGap(i + 1))));
    means.push({
      type: "scatter",
      mode: marked.some(Boolean) ? "lines+markers" : "lines",
      meta: [label],
      x,
      y,
      hoverinfo: "none",
      line: { color: colour, width: 1.8, dash },
      error_y: {
        visible: hasBand && x.length === 1, // the band of a single point has no width
        array: [series.high?.[0] - y[0]],
        arrayminus: [y[0] - series.low?.[0]],
        thickness: 1,
        width: 0,
      },
      marker: { color: colour, opacity: 1, line: { width: 0 }, size: marked.map((isMarked) => (isMarked ? 6 : 0)) },
    });
  }
  return [...bands, ...seeds, ...means];
}

function barTraces(chart) {
  const bodies = [], values = [];
  const largest = Math.max(...chart.series.map((series) => Math.abs(series.y[0])));
  for (const series of chart.series) {
    const { label, colour } = series;
    const [value] = series.y;
    if (value === null) continue;
    const [low, high] = [series.low?.[0] ?? value, series.high?.[0] ?? value];
    const name = escapeText(label, 22);
    const common = { meta: [label], y: [name] };
    bodies.push({
      ...common,
      type: "bar",
      orientation: "h",
      x: [value],
      hoverinfo: "none",
      marker: {
        color: `${colour}99`,
        line: { color: colour, width: 1 },
        pattern: { shape: series.hatch, bgcolor: `${colour}99`, fgcolor: "#fff", size: 6, solidity: 0.3 },
      },
      error_x: { visible: high > low, array: [high - value], arrayminus: [value - low], color: "#111", thickness: 1.3, width: 3 },
    });
    values.push({
      ...common,
      type: "scatter",
      mode: "text",
      x: [value < 0 ? low : high],
      text: [`\u2002${formatShort(value, largest)}\u2002`], // a space between the end of the interval and the number
      textposition: value < 0 ? "middle left" : "middle right",
      cliponaxis: false,
      hoverinfo: "skip",
    });
  }
  return [...bodies, ...values];
}

function axis(title, numbers, options) {
  const largest = numbers.reduce((size, number) => Math.max(size, Math.abs(number)), 0);
  return {
    title: { text: escapeText(title), font: { size: 11, color: GREY }, standoff: 6 },
    automargin: true,
    nticks: 6,
    tickfont: { size: 11, color: GREY },
    exponentformat: largest < 1 ? "power" : "B", // "B" would write 1m for a thousandth
    gridcolor: "#eceef1",
    zerolinecolor: "#cfd4da",
    zerolinewidth: 1,
    ...options,
  };
}

// Extend the range beyond the longest bar on either side, for the number at its end.
function padRange(ends) {
  const [low, high] = [Math.min(...ends), Math.max(...ends)];
  const room = 0.25 * (high - low);
  return [low < 0 ? low - room : 0, high > 0 ? high + room : 0];
}

const noData = { text: "no data", xref: "paper", yref: "paper", x: 0.5, y: 0.5, showarrow: false, font: { color: GREY } };

function makeLayout(chart) {
  const isBars = chart.kind === "bars";
  const all = (key) => chart.series.flatMap((series) => series[key] ?? []);
  const numbers = [...all("y"), ...all("low"), ...all("high")].filter((value) => value !== null);
  const { reference } = chart;
  const values = axis(chart.ylabel, numbers, {
    showticklabels: numbers.length > 0,
    autorangeoptions: isBars ? { include: padRange([0, reference ?? 0, ...numbers]) } : {},
  });
  const ends = isBars
    ? { yref: "paper", y0: 0, y1: 1, x0: reference, x1: reference }
    : { xref: "paper", x0: 0, x1: 1, y0: reference, y1: reference };
  return {
    xaxis: isBars
      ? values
      : axis(chart.xlabel, all("x"), {
          type: chart.logX ? "log" : "linear",
          ...(chart.ticks && { tickvals: chart.ticks }),
          showspikes: true,
          spikemode: "across",
          spikethickness: 1,
          spikedash: "solid",
          spikecolor: "#b5bcc4",
        }),
    yaxis: isBars ? axis(chart.xlabel, [], { type: "category", autorange: "reversed", dtick: 1, showgrid: false, ticklabelstandoff: 4 }) : values,
    shapes: reference === null ? [] : [{ type: "line", layer: "between", ...ends, line: { color: "#777777", width: 1.2, dash: "5px,4px" } }],
    annotations: numbers.length ? [] : [noData],
    barmode: "overlay",
    bargap: 0.28,
    showlegend: false,
    hovermode: isBars ? "y" : "x",
    hoverdistance: -1, // at any distance from the nearest point
    dragmode: isTouch ? false : "zoom",
    font: { family: FONT, size: 11, color: "#22272e" },
    margin: { l: 40, r: 16, t: 8, b: 34 },
  };
}

// Show the values of all series at an x below or above the panel. Plotly's own hover box would cover the lines.
const readout = document.querySelector(".readout");

function showReadout(element, x) {
  const chart = data.charts[element.dataset.chart];
  const isBars = chart.kind === "bars";
  const head = document.createElement("p");
  head.textContent = isBars ? chart.ylabel : `${chart.xlabel || "x"}: ${formatNumber(x)}`;
  const table = document.createElement("table");
  for (const series of chart.series) {
    const i = isBars ? 0 : series.x.indexOf(x);
    if (i < 0 || hidden.has(series.label)) continue;
    const row = table.insertRow();
    for (const text of [series.label, formatNumber(series.y[i]), formatInterval(series, i)])
      row.insertCell().textContent = text;
    row.cells[0].prepend(Object.assign(document.createElement("span"), { style: `background:${series.colour}` }));
    row.cells[1].className = row.cells[2].className = "number";
  }
  readout.replaceChildren(head, table);
  readout.hidden = false;
  const { left, top, bottom } = element.getBoundingClientRect();
  const { offsetWidth: width, offsetHeight: height } = readout;
  const isBelow = bottom + height < innerHeight || top - height < 0;
  readout.style.left = `${scrollX + Math.max(8, Math.min(left, document.body.clientWidth - width - 8))}px`;
  readout.style.top = `${scrollY + (isBelow ? bottom : top - height)}px`;
}

const isVisible = (trace) => trace.meta.every((name) => !hidden.has(name));

function draw(element) {
  const chart = data.charts[element.dataset.chart];
  const traces = chart.kind === "bars" ? barTraces(chart) : lineTraces(chart);
  const layout = makeLayout(chart);
  const zoom = restored.zoom?.[element.dataset.chart] ?? {};
  for (const [name, range] of Object.entries(zoom)) Object.assign(layout[name], { range, autorange: false });
  Plotly.newPlot(
    element,
    traces.map((trace) => ({ ...trace, visible: isVisible(trace) })),
    layout,
    { responsive: true, displayModeBar: false, doubleClick: "autosize", showAxisDragHandles: false },
  );
  for (const event of ["plotly_hover", "plotly_click"]) // a tap is a click without hovering
    element.on(event, ({ points }) => showReadout(element, points[0].x)); // the first point is the nearest
  element.on("plotly_unhover", () => (readout.hidden = true));
}

// Charts are drawn one at a time, those on the screen first, so that the page stays responsive.
const main = document.querySelector("main");
const stale = new Set();

function updateNext() {
  const next = chartElements.find((element) => stale.has(element) && isOnScreen(element)) ?? [...stale][0];
  if (!next) return main.removeAttribute("aria-busy");
  update(next);
  setTimeout(updateNext);
}

function isOnScreen(element) {
  const { top, bottom } = element.getBoundingClientRect();
  return bottom > 0 && top < innerHeight;
}

function update(element) {
  stale.delete(element);
  const visible = element.data?.map(isVisible);
  if (!visible) draw(element);
  else if (visible.some((value, i) => value !== element.data[i].visible)) Plotly.restyle(element, { visible });
}

function updateAll() {
  const isIdle = !main.hasAttribute("aria-busy");
  main.setAttribute("aria-busy", "true");
  chartElements.forEach((element) => stale.add(element));
  if (isIdle) setTimeout(updateNext);
}

function toggle(button) {
  const { name } = button.dataset;
  if (!hidden.delete(name)) hidden.add(name);
  button.setAttribute("aria-pressed", String(!hidden.has(name)));
  updateAll();
}

// State that survives a reload. Some browsers forbid storage for local files; then the state is lost.
const storageKey = `isqn report ${location.pathname}`;

function saveState() {
  const zoom = {};
  for (const element of chartElements)
    for (const name of ["xaxis", "yaxis"])
      if (element.layout?.[name].autorange === false) (zoom[element.dataset.chart] ??= {})[name] = element.layout[name].range;
  const open = [...document.querySelectorAll("details[open] summary")].map((summary) => summary.textContent);
  try {
    sessionStorage.setItem(storageKey, JSON.stringify({ hidden: [...hidden], scroll: scrollY, open, zoom }));
  } catch {}
}

function loadState() {
  try {
    return JSON.parse(sessionStorage.getItem(storageKey)) ?? {};
  } catch {
    return {};
  }
}

const restored = data.refresh ? loadState() : {};
const unpressed = buttons.filter((button) => button.getAttribute("aria-pressed") === "false");
const hidden = new Set(restored.hidden ?? unpressed.map((button) => button.dataset.name));

for (const button of buttons) {
  button.setAttribute("aria-pressed", String(!hidden.has(button.dataset.name)));
  button.addEventListener("click", () => toggle(button));
}

if (data.refresh) {
  for (const details of document.querySelectorAll("details"))
    details.open = (restored.open ?? []).includes(details.querySelector("summary").textContent);
  history.scrollRestoration = "manual";
  scrollTo(0, restored.scroll ?? 0);
  addEventListener("pagehide", saveState);
  setTimeout(() => location.reload(), 1000 * data.refresh);
}

addEventListener("pointerdown", () => (readout.hidden = true));

// When printing, a panel has the width that page.css gives, regardless of the window.
addEventListener("beforeprint", () => {
  stale.forEach(update);
  for (const element of chartElements) Plotly.relayout(element, { width: 330, height: element.clientHeight });
});
addEventListener("afterprint", () => {
  for (const element of chartElements) Plotly.relayout(element, { width: null, height: null, autosize: true });
});

updateAll();
