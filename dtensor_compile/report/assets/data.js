/* The page of a report. Its data are columns (see html.py); what is chosen, sought and sorted stands in the part of the address
   behind the #, so that a view can be sent to somebody else. Text of the program is only ever set as text. */

// Small helpers.

function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key.includes("-") || key === "role" || key === "scope" || key === "colspan") made.setAttribute(key, value);
    else made[key] = value;
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}
const plural = (n, one) => `${n.toLocaleString("en")} ${one}${n === 1 ? "" : "s"}`;
function timeText(ns) {
  if (ns >= 1e9) return `${(ns / 1e9).toFixed(2)} s`;
  if (ns >= 1e6) return `${(ns / 1e6).toFixed(2)} ms`;
  return `${(ns / 1e3).toFixed(1)} us`;
}
function bytesText(bytes) {
  for (const [unit, size] of [
    ["GB", 1e9],
    ["MB", 1e6],
    ["kB", 1e3],
  ])
    if (bytes >= size) return `${(bytes / size).toFixed(2)} ${unit}`;
  return `${bytes} B`;
}
const exactBytes = (bytes) => bytes.toLocaleString("en");
const baseName = (file) => file.slice(file.lastIndexOf("/") + 1);
/** blocks.3.attention -> blocks.*.attention: equal layers are one. */
const anyLayer = (module) => module.replace(/(^|\.)\d+(?=\.|$)/g, "$1*");
function addTo(map, key, value) {
  const list = map.get(key);
  if (list) list.push(value);
  else map.set(key, [value]);
}
const sum = (rows, of) => rows.reduce((total, row) => total + of(row), 0);

// The data.

const DATA = JSON.parse(document.getElementById("data").textContent);

function rowsOf(table) {
  const read = { t: (v) => DATA.texts[v], s: (v) => SOURCES[v], n: (v) => v, d: (v) => v, b: (v) => v === 1 };
  const columns = Object.entries(table.columns).map(([key, values]) => [key.slice(2), values, read[key[0]]]);
  return Array.from({ length: table.length }, (_, i) => {
    const row = {};
    for (const [name, values, of] of columns) row[name] = of(values[i]);
    return row;
  });
}
const SOURCES = [];
SOURCES.push(...rowsOf(DATA.sources));
for (const source of SOURCES) {
  source.key = source.file ? `${source.file}:${source.line}` : "";
  source.place = source.file ? `${baseName(source.file)}:${source.line}` : "";
}
const SOURCE_AT = new Map(SOURCES.map((source) => [source.key, source]));

const SIDES = DATA.sides.map((side) => {
  const made = { name: side.name };
  for (const key of ["breaks", "recompiles", "redistributions", "collectives", "decisions", "missed", "graphs", "stages", "layers"])
    made[key] = rowsOf(side[key]);
  const spans = rowsOf(side.spans);
  let next = 0,
    start = 0;
  made.graphs.forEach((graph, index) => {
    graph.begin = start;
    for (let i = 0; i < side.spans_of_graphs[index]; i++, next++) {
      spans[next].graph = graph;
      spans[next].begin = start + spans[next].start;
      spans[next].end = spans[next].begin + spans[next].seconds;
    }
    start += graph.seconds;
  });
  made.spans = spans;
  made.length = start;
  return made;
});
