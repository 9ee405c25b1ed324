"use strict";
// Draws the charts of the page and hides what its reader does not want to see.

const data = JSON.parse(document.getElementById("data").textContent);
const places = [...document.querySelectorAll(".chart")];
const buttons = [...document.querySelectorAll(".toggles button")];
const touch = matchMedia("(pointer: coarse)").matches; // a finger that drags scrolls the page, and must not zoom
const SEEDS = ""; // the name of the button for the seeds behind intervals
const GREY = "#5b6470";
const FONT = getComputedStyle(document.body).fontFamily;

// Words are words, on short lines: plotly would read tags, formulas and templates in them.
function plain(text, length = 36) {
  const lines = text.replace(new RegExp(`(.{1,${length}})(?:\\s+|$)`, "g"), "$1\n").trim().split("\n");
  return lines.map((line) => line.replace(/[&<>$%]/g, (letter) => `&#${letter.charCodeAt(0)};`)).join("<br>");
}

function show(value) {
  if (value === null) return "–";
  const rounded = Number(value.toPrecision(Math.abs(value) < 1000 ? 4 : 15));
  const text = Math.abs(value) < 1000 ? String(rounded) : Math.round(rounded).toLocaleString("en");
  return text.replace("-", "−");
}

// Three digits or so of the largest beside it, as in 1.06 and 0.03, 43.2 or 12.4k, for where there is room for no more.
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
function brief(value, largest) {
  const near = Number(largest.toPrecision(3));
  if (near >= 1000) return compact.format(value).replace("K", "k").replace("-", "−");
  if (near < 0.1) return show(Number(value.toPrecision(3)));
  return value.toFixed(near < 10 ? 2 : near < 100 ? 1 : 0).replace("-", "−");
}

function interval({ low, high }, i) {
  return low && high && low[i] !== null && high[i] !== null ? `[${show(low[i])}, ${show(high[i])}]` : "";
}

// The outline of the interval: one closed shape for each stretch without gaps.
function band({ x, low, high }) {
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

// Names in `meta` are those of buttons: a trace is seen while none of them is off.
function lines(chart) {
  const bands = [], seeds = [], means = [];
  for (const series of chart.series) {
    const { label, colour, dash, x, y } = series;
    const silent = { type: "scatter", mode: "lines", hoverinfo: "skip" };
    const hasBand = series.low && series.high;
    if (hasBand)
      bands.push({ ...silent, ...band(series), meta: [label], fill: "toself", fillcolor: `${colour}26`, line: { width: 0 } });
    if (series.seeds)
      seeds.push({
        ...silent,
        meta: hasBand ? [label, SEEDS] : [label],
        x: series.seeds.flatMap(() => [...x, null]),
        y: series.seeds.flatMap((seed) => [...seed, null]),
        line: { color: `${colour}59`, width: 0.8 },
      });
    const gap = (i) => (y[i] ?? null) === null;
    // A point between two gaps is no line; of a few points, each is marked.
    const marked = y.map((_, i) => !gap(i) && ((chart.ticks && !series.level) || (gap(i - 1) && gap(i + 1))));
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
      marker: { color: colour, opacity: 1, line: { width: 0 }, size: marked.map((is) => (is ? 6 : 0)) },
    });
  }
  return [...bands, ...seeds, ...means];
}

function bars(chart) {
  const bodies = [], values = [];
  const largest = Math.max(...chart.series.map((series) => Math.abs(series.y[0])));
  for (const series of chart.series) {
    const { label, colour } = series;
    const [value] = series.y;
    if (value === null) continue;
    const [low, high] = [series.low?.[0] ?? value, series.high?.[0] ?? value];
    const name = plain(label, 22);
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
      text: [`\u2002${brief(value, largest)}\u2002`], // a space between the end of the interval and the number
      textposition: value < 0 ? "middle left" : "middle right",
      cliponaxis: false,
      hoverinfo: "skip",
    });
  }
  return [...bodies, ...values];
}

function axis(title, numbers, more) {
  const largest = numbers.reduce((size, number) => Math.max(size, Math.abs(number)), 0);
  return {
    title: { text: plain(title), font: { size: 11, color: GREY }, standoff: 6 },
    automargin: true,
    nticks: 6,
    tickfont: { size: 11, color: GREY },
    exponentformat: largest < 1 ? "power" : "B", // not 1m for a thousandth
    gridcolor: "#eceef1",
    zerolinecolor: "#cfd4da",
    zerolinewidth: 1,
    ...more,
  };
}

// Beyond the longest bar, on either side, for the number at its end.
function withRoom(ends) {
  const [low, high] = [Math.min(...ends), Math.max(...ends)];
  const room = 0.25 * (high - low);
  return [low < 0 ? low - room : 0, high > 0 ? high + room : 0];
}

const nothing = { text: "no data", xref: "paper", yref: "paper", x: 0.5, y: 0.5, showarrow: false, font: { color: GREY } };

function layout(chart) {
  const isBars = chart.kind === "bars";
  const all = (key) => chart.series.flatMap((series) => series[key] ?? []);
  const numbers = [...all("y"), ...all("low"), ...all("high")].filter((value) => value !== null);
  const { reference } = chart;
  const values = axis(chart.ylabel, numbers, {
    showticklabels: numbers.length > 0,
    autorangeoptions: isBars ? { include: withRoom([0, reference ?? 0, ...numbers]) } : {},
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
    annotations: numbers.length ? [] : [nothing],
    barmode: "overlay",
    bargap: 0.28,
    showlegend: false,
    hovermode: isBars ? "y" : "x",
    hoverdistance: -1, // however far the next point is
    dragmode: touch ? false : "zoom",
    font: { family: FONT, size: 11, color: "#22272e" },
    margin: { l: 40, r: 16, t: 8, b: 34 },
  };
}

// What all labels have at an x, beside the panel: plotly's own box would cover the lines that it is about.
const readout = document.querySelector(".readout");

function readOut(place, x) {
  const chart = data.charts[place.dataset.chart];
  const isBars = chart.kind === "bars";
  const head = document.createElement("p");
  head.textContent = isBars ? chart.ylabel : `${chart.xlabel || "x"}: ${show(x)}`;
  const table = document.createElement("table");
  for (const series of chart.series) {
    const i = isBars ? 0 : series.x.indexOf(x);
    if (i < 0 || hidden.has(series.label)) continue;
    const row = table.insertRow();
    for (const text of [series.label, show(series.y[i]), interval(series, i)]) row.insertCell().textContent = text;
    row.cells[0].prepend(Object.assign(document.createElement("span"), { style: `background:${series.colour}` }));
    row.cells[1].className = row.cells[2].className = "number";
  }
  readout.replaceChildren(head, table);
  readout.hidden = false;
  const { left, top, bottom } = place.getBoundingClientRect();
  const { offsetWidth: width, offsetHeight: height } = readout;
  const fits = bottom + height < innerHeight || top - height < 0;
  readout.style.left = `${scrollX + Math.max(8, Math.min(left, document.body.clientWidth - width - 8))}px`;
  readout.style.top = `${scrollY + (fits ? bottom : top - height)}px`;
}

const isShown = (trace) => trace.meta.every((name) => !hidden.has(name));

function draw(place) {
  const chart = data.charts[place.dataset.chart];
  const traces = chart.kind === "bars" ? bars(chart) : lines(chart);
  const look = layout(chart);
  const zoom = remembered.zoom?.[place.dataset.chart] ?? {};
  for (const [name, range] of Object.entries(zoom)) Object.assign(look[name], { range, autorange: false });
  Plotly.newPlot(
    place,
    traces.map((trace) => ({ ...trace, visible: isShown(trace) })),
    look,
    { responsive: true, displayModeBar: false, doubleClick: "autosize", showAxisDragHandles: false },
  );
  for (const event of ["plotly_hover", "plotly_click"]) // a tap only clicks
    place.on(event, ({ points }) => readOut(place, points[0].x)); // the nearest is the first
  place.on("plotly_unhover", () => (readout.hidden = true));
}

// Charts are drawn one after the other, those on the screen first, so that the page can be used meanwhile.
const main = document.querySelector("main");
const stale = new Set();

function work() {
  const next = places.find((place) => stale.has(place) && isOnScreen(place)) ?? [...stale][0];
  if (!next) return main.removeAttribute("aria-busy");
  renew(next);
  setTimeout(work);
}

function isOnScreen(place) {
  const { top, bottom } = place.getBoundingClientRect();
  return bottom > 0 && top < innerHeight;
}

function renew(place) {
  stale.delete(place);
  const visible = place.data?.map(isShown);
  if (!visible) draw(place);
  else if (visible.some((is, i) => is !== place.data[i].visible)) Plotly.restyle(place, { visible });
}

function renewAll() {
  const resting = !main.hasAttribute("aria-busy");
  main.setAttribute("aria-busy", "true");
  places.forEach((place) => stale.add(place));
  if (resting) setTimeout(work);
}

function toggle(button) {
  const { name } = button.dataset;
  if (!hidden.delete(name)) hidden.add(name);
  button.setAttribute("aria-pressed", String(!hidden.has(name)));
  renewAll();
}

// What survives a reload. A browser may forbid storage, as some do for files: then nothing does.
const memory = `isqn report ${location.pathname}`;

function remember() {
  const zoom = {};
  for (const place of places)
    for (const name of ["xaxis", "yaxis"])
      if (place.layout?.[name].autorange === false) (zoom[place.dataset.chart] ??= {})[name] = place.layout[name].range;
  const open = [...document.querySelectorAll("details[open] summary")].map((summary) => summary.textContent);
  try {
    sessionStorage.setItem(memory, JSON.stringify({ hidden: [...hidden], scroll: scrollY, open, zoom }));
  } catch {}
}

function recall() {
  try {
    return JSON.parse(sessionStorage.getItem(memory)) ?? {};
  } catch {
    return {};
  }
}

const remembered = data.refresh ? recall() : {};
const off = buttons.filter((button) => button.getAttribute("aria-pressed") === "false");
const hidden = new Set(remembered.hidden ?? off.map((button) => button.dataset.name));

for (const button of buttons) {
  button.setAttribute("aria-pressed", String(!hidden.has(button.dataset.name)));
  button.addEventListener("click", () => toggle(button));
}

if (data.refresh) {
  for (const details of document.querySelectorAll("details"))
    details.open = (remembered.open ?? []).includes(details.querySelector("summary").textContent);
  history.scrollRestoration = "manual";
  scrollTo(0, remembered.scroll ?? 0);
  addEventListener("pagehide", remember);
  setTimeout(() => location.reload(), 1000 * data.refresh);
}

addEventListener("pointerdown", () => (readout.hidden = true));

// On paper a panel is as wide as page.css says, whatever the window is.
addEventListener("beforeprint", () => {
  stale.forEach(renew);
  for (const place of places) Plotly.relayout(place, { width: 330, height: place.clientHeight });
});
addEventListener("afterprint", () => {
  for (const place of places) Plotly.relayout(place, { width: null, height: null, autosize: true });
});

renewAll();
