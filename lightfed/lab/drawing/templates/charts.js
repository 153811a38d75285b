"use strict";
// Draws the charts of a page with vega-embed, whose script is packed in the page.
const dark = matchMedia("(prefers-color-scheme: dark)");
const theme = JSON.parse(document.getElementById("theme").textContent);
const figures = [...document.querySelectorAll(".figure")].map((element) => {
  const charts = JSON.parse(element.querySelector("script").textContent);
  return { element, charts, views: [], hidden: new Set(), zooms: [] };
});

function zoomsOf(figure) {
  const ofZoom = { signals: (name) => /^zoom_[xy]$/.test(name), data: () => false, recurse: true };
  return figure.views.map((view) => view.getState(ofZoom).signals);
}

async function unpack() {
  const packed = document.getElementById("library").textContent.trim();
  const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
}

function rows({ columns, data }) {
  return data.map((row) => Object.fromEntries(columns.map((name, k) => [name, row[k]])));
}

// drag with a mouse moves, Ctrl and wheel zooms: a plain wheel and a finger scroll the page
const ZOOM = {
  name: "zoom",
  select: {
    type: "interval",
    translate: "[pointerdown[event.pointerType == 'mouse'], window:pointerup] > window:pointermove!",
    zoom: "wheel![event.ctrlKey]",
  },
  bind: "scales",
};

// series that can be hidden, and zoom where both positions are numbers
function interactive(chart) {
  const spec = structuredClone(chart.spec);
  if (!chart.series) return spec;
  spec.params = [{ name: "hidden", value: [] }];
  spec.transform = [{ filter: "indexof(hidden, datum.series) < 0" }];
  const isNumber = (channel, name) => channel?.type === "quantitative" && channel.field === name;
  const zoomed = spec.layer.find(({ encoding: { x, y } }) => isNumber(x, "x") && isNumber(y, "y"));
  if (zoomed) zoomed.params = [ZOOM];
  return spec;
}

// a chart names its colours; its legend is the page's, with buttons
function specify(chart, host, scheme) {
  const colours = theme[scheme];
  const { axis } = theme.config;
  const labelLimit = Math.max(180, 0.4 * host.clientWidth);
  const config = { ...theme.config, axis: { ...axis, labelLimit } };
  const autosize = { type: "fit-x", contains: "padding" };
  const bare = (key, value) => (key === "legend" && chart.series ? null : value);
  const spec = JSON.stringify({ ...interactive(chart), width: "container", autosize }, bare);
  const named = (_, name) => JSON.stringify(colours[name] ?? colours.series[name.slice(1)]);
  const coloured = (text) => JSON.parse(text.replace(/"theme:(\w+)"/g, named));
  return { ...coloured(spec), config: coloured(JSON.stringify(config)), data: { values: rows(chart.data) } };
}

async function draw(figure) {
  const scheme = dark.matches ? "dark" : "light";
  const hosts = figure.element.querySelectorAll(".chart");
  if (figure.views.length) figure.zooms = zoomsOf(figure);
  figure.views.forEach((view) => view.finalize());
  figure.views = await Promise.all(figure.charts.map(async (chart, i) => {
    const options = { ast: true, actions: false, renderer: "svg", tooltip: { theme: scheme } };
    const { view } = await vegaEmbed(hosts[i], specify(chart, hosts[i], scheme), options);
    for (const [name, ends] of Object.entries(figure.zooms[i] ?? {})) if (ends) view.signal(name, ends);
    await view.runAsync();
    entitle(hosts[i]);
    return view;
  }));
  await hide(figure);
  figure.element.dataset.drawn = scheme;
}

// the whole name of a label that is cut
function entitle(host) {
  for (const label of host.querySelectorAll("svg text")) {
    const whole = String(label.__data__?.text ?? "");
    if (!whole || label.textContent === whole) continue;
    const title = document.createElementNS("http://www.w3.org/2000/svg", "title");
    title.textContent = whole;
    label.append(title);
    label.style.pointerEvents = "auto";
  }
}

async function hide(figure) {
  const views = figure.views.filter((_, i) => figure.charts[i].series);
  await Promise.all(views.map((view) => view.signal("hidden", [...figure.hidden]).runAsync()));
}

function toggle(figure, button) {
  const name = button.dataset.name;
  const shown = figure.hidden.delete(name);
  if (!shown) figure.hidden.add(name);
  button.setAttribute("aria-pressed", String(shown));
  hide(figure);
}

function text(value, format) {
  if (value === null || value === undefined) return "";
  if (typeof value !== "number") return String(value);
  if (format.includes("%")) return `${(100 * value).toFixed(2)} %`;
  return Number.isInteger(value) ? value.toLocaleString("en") : String(Number(value.toPrecision(5)));
}

function table(figure, folded) {
  const MOST = 2000;
  for (const { columns, data } of figure.charts) {
    const names = Object.keys(columns);
    const every = rows(data).filter((row) => names.some((name) => typeof row[name] === "number"));
    const made = document.createElement("table");
    const head = made.createTHead().insertRow();
    for (const name of names) {
      const cell = document.createElement("th");
      cell.scope = "col";
      cell.textContent = columns[name][0];
      head.append(cell);
    }
    const body = made.createTBody();
    for (const row of every.slice(0, MOST)) {
      const line = body.insertRow();
      for (const name of names) line.insertCell().textContent = text(row[name], columns[name][1]);
    }
    const frame = document.createElement("div");
    frame.className = "scroll";
    frame.tabIndex = 0;
    frame.append(made);
    folded.append(frame);
    if (every.length > MOST) folded.append(`The first ${MOST} of ${every.length} rows.`);
  }
}

for (const figure of figures) {
  for (const button of figure.element.querySelectorAll(".legend button")) {
    button.setAttribute("aria-pressed", String(!figure.hidden.has(button.dataset.name)));
    button.addEventListener("click", () => toggle(figure, button));
  }
  const folded = figure.element.querySelector("details");
  folded.addEventListener("toggle", () => table(figure, folded), { once: true });
}
const drawAll = async () => { for (const figure of figures) await draw(figure); };
if (figures.length) unpack().then(drawAll).then(() => dark.addEventListener("change", drawAll));
