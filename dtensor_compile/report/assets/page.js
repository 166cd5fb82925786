"use strict";
/* The page of a report. Its data are columns (see html.py); what is chosen, sought and sorted stands in the part of the address
   behind the #, so that a view can be sent to somebody else. Text of the program is only ever set as text. */

// Small helpers --------------------------------------------------------------------------------------------------------------

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
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) if (bytes >= size) return `${(bytes / size).toFixed(2)} ${unit}`;
  return `${bytes} B`;
}
const exactBytes = (bytes) => bytes.toLocaleString("en");
const baseName = (file) => file.slice(file.lastIndexOf("/") + 1);
/** blocks.3.attention -> blocks.*.attention: layers that are alike are one. */
const anyLayer = (module) => module.replace(/(^|\.)\d+(?=\.|$)/g, "$1*");
function addTo(map, key, value) {
  const list = map.get(key);
  if (list) list.push(value); else map.set(key, [value]);
}
const sum = (rows, of) => rows.reduce((total, row) => total + of(row), 0);

// Data -----------------------------------------------------------------------------------------------------------------------

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
  for (const key of ["breaks", "recompiles", "redistributions", "collectives", "decisions", "missed", "graphs"]) made[key] = rowsOf(side[key]);
  const spans = rowsOf(side.spans);
  let next = 0, start = 0;
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

// State in the address -------------------------------------------------------------------------------------------------------

const state = {
  values: new URLSearchParams(location.hash.slice(1)),
  get(key, otherwise = "") { return this.values.get(key) ?? otherwise; },
  set(key, value, otherwise = "") {
    if (value === otherwise) this.values.delete(key); else this.values.set(key, value);
    clearTimeout(this.timer);
    this.timer = setTimeout(() => history.replaceState(null, "", `#${this.values}`), 200);
  },
};
const sideNow = () => SIDES.find((side) => side.name === state.get("side")) ?? SIDES[0];

/** Buttons of which one is pressed. */
function choice(label, key, options, changed) {
  const otherwise = options[0][0];
  const buttons = options.map(([value, text]) => {
    const button = element("button", { type: "button", textContent: text });
    button.onclick = () => { state.set(key, value, otherwise); show(); changed(); };
    return [value, button];
  });
  const show = () => {
    const known = buttons.some(([value]) => value === state.get(key)) ? state.get(key) : otherwise;
    for (const [value, button] of buttons) button.setAttribute("aria-pressed", String(value === known));
  };
  show();
  return element("div", { className: "choice", role: "group", "aria-label": label }, element("span", { textContent: label }), ...buttons.map(([, button]) => button));
}

// Sections -------------------------------------------------------------------------------------------------------------------

const main = document.getElementById("main"), navigation = document.querySelector("nav");

function goTo(node, behavior = "auto") {
  node.scrollIntoView({ behavior });
  node.focus({ preventScroll: true });
}
function section(id, title, note, count = null) {
  const heading = element("h2", { textContent: title, tabIndex: -1 });
  const head = element("div", { className: "head" }, heading);
  const body = element("div");
  const made = element("section", { id, "aria-label": title }, head, note ? element("p", { className: "note", textContent: note }) : null, body);
  const number = element("span", { textContent: count === null ? "" : ` ${count()}` });
  const link = element("a", { href: `#at=${id}` }, title, number);
  link.onclick = (event) => { event.preventDefault(); state.set("at", id); goTo(heading); };
  navigation.append(link);
  main.append(made);
  return { head, body, heading, update: () => { if (count) number.textContent = ` ${count()}`; } };
}

// Lines of the program -------------------------------------------------------------------------------------------------------

/** A line as a button that goes to it in the source. */
function placeOf(source) {
  if (!source || !source.file) return element("span", { className: "quiet", textContent: "not known" });
  const button = element("button", { type: "button", className: "place", textContent: source.place, title: source.key });
  button.onclick = () => showLine(source.key);
  return button;
}
function lineCell(source) {
  const cell = element("div", { className: "code" }, placeOf(source));
  if (source.code) cell.append(element("code", { textContent: source.code.split("\n")[0], title: source.code }));
  return cell;
}
function windowOf(source) {
  const pre = element("pre", { className: "window" });
  const before = source.before ? source.before.split("\n") : [], after = source.after ? source.after.split("\n") : [];
  const near = [...before].reverse().concat(after).find((line) => line.trim()) ?? "";
  const indent = /^\s/.test(source.code) ? "" : near.slice(0, near.length - near.trimStart().length);
  [...before, indent + source.code, ...after].forEach((line, i) => {
    const number = String(source.line - before.length + i).padStart(5);
    pre.append(element("span", { className: i === before.length ? "here" : "quiet", textContent: `${number}  ${line}` }), "\n");
  });
  return pre;
}

// Tables ---------------------------------------------------------------------------------------------------------------------

const SHOWN = 100;

/** A table that can be searched and sorted. Rows with the same `alike` are one row, whose numbers are added up.
    A column has a name, a title, `of(row)` as text or number, and maybe `show(value, row, rows)` for what stands in the cell. */
class Grid {
  constructor(id, title, note, { rows, columns, alike = null, sort, none }) {
    Object.assign(this, { id, rows, columns, alike, none, order: sort });
    this.part = section(id, title, note, () => rows().length);
    this.seek = element("input", { type: "search", placeholder: "search", "aria-label": `search ${title}` });
    this.seek.oninput = () => { state.set(`${id}.q`, this.seek.value); this.limit = SHOWN; this.draw(); };
    this.count = element("span", { className: "count", "aria-live": "polite" });
    this.part.head.append(this.seek);
    if (alike) {
      this.each = element("input", { type: "checkbox" });
      this.each.onchange = () => { state.set(`${id}.each`, this.each.checked ? "1" : ""); this.draw(); };
      this.part.head.append(element("label", {}, this.each, " each layer on its own"));
    }
    this.part.head.append(this.count);
    this.limit = SHOWN;
    this.texts = new WeakMap();
  }
  text(row) {
    let text = this.texts.get(row);
    if (text === undefined) {
      const source = row.source ? `${row.source.key} ${row.source.code}` : "";
      text = `${this.columns.map((column) => column.of(row)).join(" ")} ${source}`.toLowerCase();
      this.texts.set(row, text);
    }
    return text;
  }
  groups() {
    const words = state.get(`${this.id}.q`).toLowerCase().split(/\s+/).filter(Boolean);
    const found = this.rows().filter((row) => words.every((word) => this.text(row).includes(word)));
    const groups = new Map();
    found.forEach((row, i) => addTo(groups, this.alike && !state.get(`${this.id}.each`) ? this.alike(row) : i, row));
    const [, sign, name] = /^(-?)(.*)$/.exec(state.get(`${this.id}.sort`, this.order));
    const column = this.columns.find((column) => column.name === name);
    const made = [...groups.values()].map((rows) => ({ rows, values: this.columns.map((column) => valueOf(column, rows)) }));
    if (column) {
      const i = this.columns.indexOf(column), factor = sign ? -1 : 1;
      made.sort((a, b) => factor * (column.number ? a.values[i] - b.values[i] : String(a.values[i]).localeCompare(String(b.values[i]), "en", { numeric: true })));
    }
    return { found: found.length, groups: made, sorted: column, falling: Boolean(sign) };
  }
  draw() {
    this.part.update();
    const { head, body } = this.part, all = this.rows();
    this.seek.value = state.get(`${this.id}.q`);
    if (this.each) this.each.checked = Boolean(state.get(`${this.id}.each`));
    for (const node of [...head.children].slice(1)) node.hidden = all.length === 0;
    if (all.length === 0) return body.replaceChildren(element("p", { className: "quiet", textContent: this.none }));
    const { found, groups, sorted, falling } = this.groups();
    this.count.textContent = found === all.length ? plural(all.length, "row") : `${found.toLocaleString("en")} of ${plural(all.length, "row")}`;
    if (groups.length < found) this.count.textContent += ` in ${groups.length.toLocaleString("en")}`;
    const largest = this.columns.map((column, i) => (column.number ? groups.reduce((most, group) => Math.max(most, group.values[i]), 0) : 0));
    const header = element("tr", {}, ...this.columns.map((column) => this.header(column, column === sorted, falling)));
    const table = element("table", {}, element("thead", {}, header), element("tbody", {}, ...groups.slice(0, this.limit).map((group) => this.line(group, largest))));
    body.replaceChildren(element("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": `table of ${this.id}` }, table));
    if (groups.length > this.limit) {
      const more = element("button", { type: "button", textContent: `show all ${groups.length.toLocaleString("en")} rows` });
      more.onclick = () => { this.limit = Infinity; this.draw(); };
      body.append(element("p", {}, more));
    }
  }
  header(column, sorted, falling) {
    const button = element("button", { type: "button", textContent: column.title + (sorted ? (falling ? " \u2193" : " \u2191") : "") });
    button.onclick = () => {
      const down = sorted ? !falling : Boolean(column.number);
      state.set(`${this.id}.sort`, (down ? "-" : "") + column.name, this.order);
      this.draw();
      this.part.body.querySelector(`th[data-column="${column.name}"] button`).focus();
    };
    const cell = element("th", { scope: "col", className: column.number ? "number" : "", "data-column": column.name }, button);
    if (sorted) cell.setAttribute("aria-sort", falling ? "descending" : "ascending");
    return cell;
  }
  line({ rows, values }, largest) {
    return element("tr", {}, ...this.columns.map((column, i) => {
      const cell = element("td", { className: column.number ? "number" : column.className ?? "" });
      cell.append(column.show ? column.show(values[i], rows[0], rows) : String(values[i]));
      if (column.bar && largest[i]) cell.style.setProperty("--part", `${(100 * values[i]) / largest[i]}%`);
      return cell;
    }));
  }
}
function valueOf(column, rows) {
  if (column.number) return sum(rows, column.of);
  const values = new Set(rows.map(column.of));
  return values.size === 1 ? [...values][0] : anyLayer(column.of(rows[0]));
}
const exact = (value, row) => element("span", { textContent: bytesText(value), title: `${exactBytes(value)} bytes` });
/** A module path that wraps behind its dots. */
function breakable(path) {
  const made = element("span");
  path.split(/(?<=\.)/).forEach((part, i) => made.append(...(i ? [element("wbr"), part] : [part])));
  return made;
}
const COLUMNS = {
  times: { name: "times", title: "\u00d7", number: true, of: () => 1 },
  line: { name: "line", title: "line", of: (row) => row.source.key, show: (value, row) => lineCell(row.source) },
  module: { name: "module", title: "module", of: (row) => row.module, className: "mono module", show: (value) => breakable(value) },
  phase: { name: "phase", title: "phase", of: (row) => row.phase },
  bytes: { name: "bytes", title: "bytes", number: true, bar: true, of: (row) => row.bytes, show: exact },
  time: { name: "time", title: "time", number: true, bar: true, of: (row) => row.seconds, show: timeText },
  exposed: { name: "exposed", title: "exposed", number: true, bar: true, of: (row) => row.exposed_seconds, show: timeText },
};
const tag = (text, className = "") => element("span", { className: `tag ${className}`, textContent: text });
function prose(...parts) {
  return element("div", { className: "prose" }, ...parts.filter(([, text]) => text).map(([name, text]) => element("p", {}, element("b", { textContent: `${name} ` }), text)));
}
const layersAlike = (row, ...values) => [row.source.key, anyLayer(row.module ?? ""), ...values].join("\u0000");

function makeTables() {
  const missedOrDecided = [
    COLUMNS.times,
    { name: "what", title: "what", of: (row) => row.kind, show: (value) => tag(value) },
    COLUMNS.line,
    { name: "change", title: "change", of: (row) => (row.before === row.after ? row.before : `${row.before} \u2192 ${row.after}`), className: "mono brief" },
    { name: "why", title: "why", of: (row) => row.reason, show: (value, row, rows) => prose(["", rows.length > 1 ? rows[0].reason : value]) },
  ];
  const alikeDecision = (row) => [row.kind, row.source.key, row.before, row.after, row.reason.replace(/[\d.]+/g, "")].join("\u0000");
  return [
    new Grid("breaks", "Graph breaks", "Where a graph ends: what was called there, why that ends it, and how to write it instead. Collectives before and behind a break cannot be planned together.", {
      rows: () => sideNow().breaks, sort: "-collectives", none: "None: each function is one graph.",
      columns: [
        { name: "cause", title: "cause", of: (row) => `${row.error ? "error " : ""}${row.cause} ${row.title}`, show: (value, row) => element("div", { className: "cause" }, tag(row.cause, "worse"), element("p", { textContent: row.title }), element("p", { className: "quiet", textContent: `${row.error ? "ends the compilation; " : ""}breaks under: ${row.breaks_under}` })) },
        { name: "line", title: "line", of: (row) => row.source.key, show: (value, row) => element("div", { className: "code" }, placeOf(row.source), windowOf(row.source), element("p", { className: "quiet" }, "called: ", element("code", { textContent: row.called }))) },
        { name: "why", title: "why, and what instead", of: (row) => `${row.why} ${row.instead} ${row.message}`, show: (value, row) => element("div", {}, prose(["Why:", row.why], ["Instead:", row.instead]), element("details", {}, element("summary", { textContent: "Dynamo's words" }), element("pre", { className: "window", textContent: row.message }))) },
        { name: "times", title: "met", number: true, of: (row) => row.count },
        { name: "graphs", title: "graphs", number: true, of: (row) => row.graphs },
        { name: "collectives", title: "before + behind", number: true, of: (row) => row.collectives_before + row.collectives_after, show: (value, row) => `${row.collectives_before} + ${row.collectives_after}` },
      ],
    }),
    new Grid("recompiles", "Recompiles", "What was compiled again, and the guard that did not hold.", {
      rows: () => sideNow().recompiles, sort: "-seconds", none: "None.",
      columns: [
        { name: "function", title: "function", of: (row) => row.function, className: "mono" },
        COLUMNS.line,
        { name: "cause", title: "cause", of: (row) => row.cause, show: (value) => tag(value) },
        { name: "guard", title: "guard that did not hold", of: (row) => row.reason, show: (value) => element("pre", { className: "window", textContent: value.trim() }) },
        { name: "seconds", title: "measured", number: true, bar: true, of: (row) => row.measured_seconds, show: timeText },
      ],
    }),
    new Grid("redistributions", "Redistributions", "Each change of placement, what forced it, and what became of it: bytes as captured and as sent in the end. Layers that are alike are one row.", {
      rows: () => sideNow().redistributions, sort: "-bytes",
      none: "None are known: the graphs of stock torch hold collectives only, and a program without DTensors has none.",
      alike: (row) => layersAlike(row, row.before, row.after, row.phase, row.shape, row.dtype, row.plan, row.fate, row.operator),
      columns: [
        COLUMNS.times, COLUMNS.line, COLUMNS.module,
        { name: "change", title: "change", of: (row) => `${row.before}->${row.after} ${row.phase}`, className: "change", show: (value, row) => element("div", {}, element("code", { textContent: `${row.before} \u2192 ${row.after}` }), element("div", { className: "quiet", textContent: row.phase })) },
        { name: "captured", title: "captured", number: true, of: (row) => row.bytes_before, show: exact },
        { ...COLUMNS.bytes, title: "sent" }, COLUMNS.time, COLUMNS.exposed,
        { name: "why", title: "why", of: (row) => (row.explicit ? "explicit" : `implicit ${row.operator}`), show: (value, row) => (row.explicit ? "explicit" : element("span", {}, "implicit, for ", element("code", { textContent: row.operator }))), className: "brief" },
        { name: "fate", title: "what became of it", of: (row) => `${row.fate} ${row.decided_by} ${row.reason}`, className: "brief", show: (value, row) => element("span", { title: row.reason }, row.fate, row.decided_by ? ` by ${row.decided_by}` : "", row.fate === "sent" ? "" : element("div", { className: "quiet", textContent: row.reason })) },
        { name: "plan", title: "plan", of: (row) => row.plan, className: "mono", show: (value) => element("span", { title: value, textContent: value.includes("\n") ? value : value.split(" ")[0] }) },
        { name: "shape", title: "shape", of: (row) => `[${row.shape}]\n${row.dtype}`, className: "mono shape" },
      ],
    }),
    new Grid("collectives", "Collectives", "What is sent in the end, those that the program calls itself included.", {
      rows: () => sideNow().collectives, sort: "-exposed", none: "None.",
      alike: (row) => layersAlike(row, row.kind, row.mesh_dim, row.phase, row.shape, row.dtype),
      columns: [
        COLUMNS.times,
        { name: "kind", title: "collective", of: (row) => `${row.kind}[${row.mesh_dim}]`, className: "mono" },
        COLUMNS.line, COLUMNS.bytes, COLUMNS.time, COLUMNS.exposed, COLUMNS.module, COLUMNS.phase,
        { name: "shape", title: "local input", of: (row) => `[${row.shape}]\n${row.dtype}`, className: "mono shape" },
        { name: "ranks", title: "ranks", of: (row) => String(row.ranks), className: "number" },
        { name: "from", title: "comes from", of: (row) => (row.redistribution < 0 ? "the program" : "a redistribution") },
      ],
    }),
    new Grid("missed", "What did not happen, and why", "Collectives that are not hidden, not merged, or not run in pieces beside a matmul.", {
      rows: () => sideNow().missed, sort: "what", none: "Nothing.", alike: alikeDecision, columns: missedOrDecided,
    }),
    new Grid("decisions", "What was decided", "What the passes and the lowering did to the graphs.", {
      rows: () => sideNow().decisions, sort: "what", none: "Nothing is known.", alike: alikeDecision, columns: missedOrDecided,
    }),
  ];
}

// Bytes by what they have in common ------------------------------------------------------------------------------------------

const NO_MODULE = "(no module)";
const BY = {
  module: ["module", (row) => anyLayer(row.module) || NO_MODULE],
  layer: ["module, each layer", (row) => row.module || NO_MODULE],
  dim: ["mesh dim", (row) => row.mesh_dim],
  kind: ["kind", (row) => row.kind],
  line: ["line", (row) => row.source.place || "not known"],
  phase: ["phase", (row) => row.phase],
};
const METRIC = {
  bytes: ["bytes", (row) => row.bytes, bytesText],
  time: ["time", (row) => row.seconds, timeText],
  exposed: ["exposed time", (row) => row.exposed_seconds, timeText],
};

function makeBars() {
  const BARS = 24;
  let limit = BARS;
  const part = section("bytes", "Who sends what", "");
  const draw = () => {
    const [, of] = BY[state.get("by")] ?? BY.module, [, measure, text] = METRIC[state.get("metric")] ?? METRIC.bytes;
    const sums = SIDES.map((side) => {
      const groups = new Map();
      for (const row of side.collectives) groups.set(of(row), (groups.get(of(row)) ?? 0) + measure(row));
      return groups;
    });
    const names = [...new Set(sums.flatMap((groups) => [...groups.keys()]))];
    const most = (name) => Math.max(...sums.map((groups) => groups.get(name) ?? 0));
    names.sort((a, b) => (sums[0].get(b) ?? 0) - (sums[0].get(a) ?? 0) || most(b) - most(a) || a.localeCompare(b, "en", { numeric: true }));
    const largest = names.reduce((value, name) => Math.max(value, most(name)), 0), whole = sums.map((groups) => sum([...groups.values()], (value) => value));
    const bars = element("div", { className: "bars", role: "list" });
    for (const name of names.slice(0, limit)) {
      const values = sums.map((groups) => groups.get(name) ?? 0);
      const share = whole[0] ? `${((100 * values[0]) / whole[0]).toFixed(1)}%` : "";
      const pair = element("div", { className: "pair", "aria-hidden": "true" }, ...values.map((value, i) => {
        const bar = element("i", { className: i ? "stock" : "" });
        bar.style.width = `${largest ? (100 * value) / largest : 0}%`;
        return bar;
      }));
      const figures = [element("b", { textContent: text(values[0]) }), element("span", { textContent: share }), element("span", { className: "quiet", textContent: SIDES[1] ? `${SIDES[1].name} ${text(values[1])}` : "" })];
      const row = element("div", { role: "listitem" }, element("div", { className: "name", textContent: name }), pair, ...figures);
      row.style.display = "contents";
      bars.append(row);
    }
    const legend = element("p", { className: "legend" }, ...SIDES.map((side, i) => {
      const swatch = element("i");
      swatch.style.background = i ? "var(--stock)" : "var(--ours)";
      return element("span", {}, swatch, side.name);
    }));
    const more = names.length > limit ? element("button", { type: "button", textContent: `show all ${names.length}` }) : null;
    if (more) more.onclick = () => { limit = Infinity; draw(); };
    part.body.replaceChildren(names.length ? legend : element("p", { className: "quiet", textContent: "Nothing is sent." }), bars, element("p", {}, ...(more ? [more] : [])));
  };
  part.head.append(
    choice("by", "by", Object.entries(BY).map(([key, [title]]) => [key, title]), draw),
    choice("show", "metric", Object.entries(METRIC).map(([key, [title]]) => [key, title]), draw),
  );
  return { draw };
}

// The source with its costs --------------------------------------------------------------------------------------------------

let showLine = () => {};

function makeSource() {
  const part = section("source", "Source", "Lines that send, compute or break, with what each costs. A figure in the margin leads to its collectives.");
  let lines = new Map(), collectiveTable = null;
  const draw = () => {
    const side = sideNow(), costs = new Map(), breaks = new Map();
    const cost = (key) => costs.get(key) ?? costs.set(key, { bytes: 0, time: 0, exposed: 0, compute: 0, count: 0 }).get(key);
    for (const row of side.collectives) {
      const at = cost(row.source.key);
      at.bytes += row.bytes; at.time += row.seconds; at.exposed += row.exposed_seconds; at.count += 1;
    }
    for (const span of side.spans) if (span.collective < 0) cost(span.where).compute += span.seconds;
    for (const row of side.breaks) addTo(breaks, row.source.key, row);
    const largest = { bytes: 0, time: 0, exposed: 0, compute: 0 };
    for (const [key, value] of costs) if (key) for (const name of Object.keys(largest)) largest[name] = Math.max(largest[name], value[name]);
    lines = new Map();
    const files = DATA.files.map((file) => {
      const keys = file.excerpts.flatMap(([first, text]) => text.map((_, i) => `${file.name}:${first + i}`));
      const here = keys.map((key) => costs.get(key)).filter(Boolean);
      return { ...file, bytes: sum(here, (c) => c.bytes), exposed: sum(here, (c) => c.exposed), broken: sum(keys, (key) => breaks.get(key)?.length ?? 0) };
    });
    files.sort((a, b) => b.broken - a.broken || b.bytes - a.bytes);
    part.body.replaceChildren(...files.map((file) => fileOf(file, costs, breaks, largest)));
    if (!files.length) part.body.append(element("p", { className: "quiet", textContent: "No line sends or breaks." }));
  };
  const fileOf = (file, costs, breaks, largest) => {
    const body = element("tbody");
    file.excerpts.forEach(([first, text], index) => {
      if (index) body.append(element("tr", { className: "gap" }, element("td", { colspan: 6 })));
      text.forEach((code, i) => body.append(lineOf(`${file.name}:${first + i}`, first + i, code, costs, breaks, largest)));
    });
    const titles = ["bytes", "time", "exposed", "compute"].map((title) => element("th", { scope: "col", className: "number", textContent: title }));
    const table = element("table", {}, element("thead", {}, element("tr", {}, ...titles, element("th", { scope: "col", textContent: "" }), element("th", { scope: "col", textContent: "" }))), body);
    const about = ` ${bytesText(file.bytes)} sent, ${timeText(file.exposed)} exposed${file.broken ? `, ${plural(file.broken, "graph break")}` : ""}`;
    return element("details", { className: "file", open: true }, element("summary", {}, element("b", { className: "mono", textContent: file.name }), element("span", { className: "quiet", textContent: about })),
      element("div", { className: "lines", tabIndex: 0, role: "region", "aria-label": file.name }, table));
  };
  const lineOf = (key, number, code, costs, breaks, largest) => {
    const cost = costs.get(key), broken = breaks.get(key) ?? [];
    const figures = [["bytes", bytesText], ["time", timeText], ["exposed", timeText], ["compute", timeText]].map(([name, text]) => {
      const cell = element("td", { className: "number" });
      if (!cost || !cost[name]) return cell;
      cell.style.setProperty("--part", `${(100 * cost[name]) / largest[name]}%`);
      if (name !== "bytes") { cell.textContent = text(cost[name]); return cell; }
      const button = element("button", { type: "button", className: "place", textContent: text(cost[name]), title: `${exactBytes(cost.bytes)} bytes in ${plural(cost.count, "collective")}` });
      button.onclick = () => { state.set("collectives.q", key); collectiveTable.draw(); goTo(collectiveTable.part.heading); };
      cell.append(button);
      return cell;
    });
    const text = element("td", { className: "code", textContent: code || " " });
    for (const row of broken) text.append(tag(`breaks: ${row.cause}`));
    const line = element("tr", { className: `${cost?.count ? "costs" : ""} ${broken.length ? "breaks" : ""}`, tabIndex: -1 }, ...figures, element("td", { className: "at", textContent: number }), text);
    lines.set(key, line);
    return line;
  };
  showLine = (key) => {
    const line = lines.get(key);
    if (!line) return;
    line.closest("details").open = true;
    document.querySelector("tr.flash")?.classList.remove("flash");
    line.classList.add("flash");
    line.scrollIntoView({ block: "center" });
    line.focus({ preventScroll: true });
  };
  return { draw, leadTo: (table) => { collectiveTable = table; } };
}

// The timeline ---------------------------------------------------------------------------------------------------------------

const KIND_COLOUR = [["all_gather", "gather"], ["reduce_scatter", "scatter"], ["all_reduce", "reduce"], ["all_to_all", "exchange"]];
const colourOf = (kind) => KIND_COLOUR.find(([start]) => kind.startsWith(start))?.[1] ?? "other";

/** What is known of a span, as pairs of a name and a text. */
function spanFacts(span, side) {
  const facts = [["when", `${timeText(span.begin)} + ${timeText(span.seconds)}, ${span.graph.phase}`]];
  const source = SOURCE_AT.get(span.where);
  if (span.where) facts.push(["line", `${span.where}${source ? `\n${source.code.split("\n")[0]}` : ""}`]);
  if (span.module) facts.push(["module", span.module]);
  const collective = side.collectives[span.collective];
  if (!collective) return facts;
  const { exposed_seconds: exposed, seconds } = collective;
  const hidden = exposed ? `${timeText(exposed)} exposed${exposed < seconds ? `, ${timeText(seconds - exposed)} hidden` : ""}` : "hidden behind compute";
  facts.push(["bytes", `${exactBytes(collective.bytes)}  ([${collective.shape}] ${collective.dtype}, ${plural(collective.ranks, "rank")} of ${collective.mesh_dim})`], ["cost", hidden]);
  const cause = side.redistributions[collective.redistribution];
  if (cause) facts.push(["why", `${cause.before} \u2192 ${cause.after}, ${cause.explicit ? "asked for" : `for ${cause.operator}`}`], ["plan", cause.plan]);
  return facts;
}
const factList = (facts) => element("dl", {}, ...facts.flatMap(([name, text]) => [element("dt", { textContent: name }), element("dd", { textContent: text })]));

function makeTimeline() {
  const part = section("timeline", "Timeline", "One step on one rank: the graphs one after the other. Drag to move, Ctrl and the wheel to zoom; with the keyboard: arrows, + and -, 0 for all, n and p for the next and the previous collective, e and E for exposed ones.");
  const canvas = element("canvas", { tabIndex: 0, role: "img", "aria-label": "timeline of compute and communication" });
  const detail = element("div", { className: "detail", "aria-live": "polite" }), tip = document.getElementById("tip");
  const legend = element("p", { className: "legend" });
  const button = (text, label, act) => { const made = element("button", { type: "button", textContent: text, "aria-label": label }); made.onclick = act; return made; };
  part.head.append(element("div", { className: "choice" },
    button("\u2212", "zoom out", () => zoom(1.6)), button("+", "zoom in", () => zoom(1 / 1.6)), button("all", "show all", () => look(0, length)),
    button("next exposed", "next exposed collective", () => step(1, true))));
  part.body.append(canvas, legend, detail);
  const LABEL = 118, AXIS = 22, LANE = 34, GAP = 8, OVERVIEW = 26;
  let side, lanes, length, from, to, chosen = null, theme = {}, width = 0;

  function readTheme() {
    const style = getComputedStyle(document.documentElement);
    for (const name of ["page", "panel", "line", "text", "quiet", "ink", "focus", "exposed", "compute", "gather", "scatter", "reduce", "exchange", "other"]) theme[name] = style.getPropertyValue(`--${name}`).trim();
  }
  function read() {
    side = sideNow();
    length = Math.max(side.length, ...side.spans.map((span) => span.end).slice(-1), 1);
    const item = (span, a, b, colour, text) => ({ span, a, b, colour, text });
    const compute = [], communication = [], waits = [];
    for (const span of side.spans) {
      length = Math.max(length, span.end);
      if (span.collective < 0) { compute.push(item(span, span.begin, span.end, "compute", span.name)); continue; }
      const collective = side.collectives[span.collective];
      communication.push(item(span, span.begin, span.end, colourOf(span.name), `${span.name}[${collective.mesh_dim}]`));
      if (collective.exposed_seconds > 0) waits.push(item(span, span.end - collective.exposed_seconds, span.end, "exposed", "waits"));
    }
    const graphs = side.graphs.map((graph) => ({ graph, a: graph.begin, b: graph.begin + graph.seconds, colour: "other", text: `${graph.phase} ${graph.function}` }));
    lanes = [["graphs", graphs], ["compute", compute], ["communication", communication], ["exposed", waits]].map(([name, items]) => ({ name, items: items.sort((a, b) => a.a - b.a) }));
    const [a, b] = state.get("view").split("-").map(Number);
    [from, to] = b > a && a >= 0 && b <= length * 1.001 ? [a, b] : [0, length];
    chosen = null;
    detail.replaceChildren(...summary());
    const kinds = [...new Set(side.collectives.map((row) => row.kind))].map((kind) => [kind, colourOf(kind)]);
    legend.replaceChildren(...[["compute", "compute"], ...kinds, ["exposed: compute waits", "exposed"]].map(([text, colour]) => {
      const swatch = element("i");
      swatch.style.background = `var(--${colour})`;
      return element("span", {}, swatch, text);
    }));
  }
  function summary() {
    const rows = side.graphs.map((graph, i) => [`graph ${i}`, `${graph.phase} of ${graph.function || "a function"}: ${plural(graph.nodes, "node")}, compute ${timeText(graph.compute_seconds)}, communication ${timeText(graph.communication_seconds)}, exposed ${timeText(graph.exposed_seconds)}`]);
    return [element("p", { className: "quiet", textContent: side.graphs.length ? "Point at a span, or click it to keep its details here." : "No graph was compiled." }), factList(rows.slice(0, 12))];
  }
  const x = (time) => LABEL + ((time - from) / (to - from)) * (width - LABEL);
  const timeAt = (pixel) => from + ((pixel - LABEL) / (width - LABEL)) * (to - from);
  const laneTop = (i) => OVERVIEW + AXIS + i * (LANE + GAP);
  const height = OVERVIEW + AXIS + 4 * (LANE + GAP);
  /** First item that ends behind `time`. */
  function firstAt(items, time) {
    let low = 0, high = items.length;
    while (low < high) { const middle = (low + high) >> 1; if (items[middle].b < time) low = middle + 1; else high = middle; }
    return low;
  }
  function draw() {
    const ratio = devicePixelRatio || 1;
    width = canvas.clientWidth || 800;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.fillStyle = theme.page;
    pen.fillRect(0, 0, width, height);
    pen.textBaseline = "middle";
    drawOverview(pen);
    drawAxis(pen);
    lanes.forEach((lane, i) => drawLane(pen, lane, laneTop(i), LANE));
  }
  function drawOverview(pen) {
    const scale = (width - LABEL) / length;
    pen.fillStyle = theme.panel;
    pen.fillRect(LABEL, 0, width - LABEL, OVERVIEW - 4);
    for (const [lane, top] of [[lanes[2], 3], [lanes[3], 12]]) {
      for (const item of lane.items) {
        pen.fillStyle = theme[item.colour];
        pen.fillRect(LABEL + item.a * scale, top, Math.max((item.b - item.a) * scale, .5), 7);
      }
    }
    pen.strokeStyle = theme.focus;
    pen.lineWidth = 2;
    pen.strokeRect(LABEL + from * scale + 1, 1, Math.max((to - from) * scale - 2, 3), OVERVIEW - 6);
    pen.fillStyle = theme.quiet;
    pen.font = "12px system-ui, 'DejaVu Sans', sans-serif";
    pen.fillText("whole step", 8, (OVERVIEW - 4) / 2);
  }
  function drawAxis(pen) {
    const rough = (to - from) / Math.max(2, (width - LABEL) / 120), power = 10 ** Math.floor(Math.log10(rough));
    const tick = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= rough);
    pen.font = "12px system-ui, 'DejaVu Sans', sans-serif";
    for (let time = Math.ceil(from / tick) * tick; time <= to; time += tick) {
      pen.fillStyle = theme.line;
      pen.fillRect(Math.round(x(time)), OVERVIEW + AXIS - 4, 1, height);
      pen.fillStyle = theme.quiet;
      pen.fillText(timeText(time), x(time) + 3, OVERVIEW + AXIS / 2);
    }
  }
  function drawLane(pen, lane, top, tall) {
    pen.save();
    pen.fillStyle = theme.text;
    pen.font = "13px system-ui, 'DejaVu Sans', sans-serif";
    pen.fillText(lane.name, 8, top + tall / 2);
    pen.beginPath();
    pen.rect(LABEL, top - 2, width - LABEL, tall + 4);
    pen.clip();
    pen.font = "11.5px ui-monospace, 'DejaVu Sans Mono', monospace";
    for (let i = firstAt(lane.items, from); i < lane.items.length && lane.items[i].a <= to; i++) {
      const item = lane.items[i], left = x(item.a), wide = x(item.b) - left;
      pen.fillStyle = theme[item.colour];
      pen.fillRect(left, top, Math.max(wide > 4 ? wide - 1 : wide, .6), tall);
      const start = Math.max(left, LABEL), room = left + wide - start - 8;
      if (room > 22) {
        pen.fillStyle = theme.ink;
        const most = Math.floor(room / 7);
        pen.fillText(item.text.length > most ? `${item.text.slice(0, Math.max(most - 1, 1))}\u2026` : item.text, start + 4, top + tall / 2);
      }
      if (chosen && item.span === chosen) {
        pen.strokeStyle = theme.text;
        pen.lineWidth = 2;
        pen.strokeRect(left, top, Math.max(wide, 2), tall);
      }
    }
    pen.restore();
  }
  function look(a, b) {
    const least = 50, size = Math.min(Math.max(b - a, least), length), start = Math.min(Math.max(a, 0), length - size);
    [from, to] = [start, start + size];
    state.set("view", size >= length * .999 ? "" : `${Math.round(from)}-${Math.round(to)}`);
    draw();
  }
  function zoom(factor, around = (from + to) / 2) { look(around - (around - from) * factor, around + (to - around) * factor); }
  function itemAt(event) {
    const box = canvas.getBoundingClientRect(), px = event.clientX - box.left, py = event.clientY - box.top;
    const lane = lanes.find((_, i) => py >= laneTop(i) && py <= laneTop(i) + LANE);
    if (!lane || px < LABEL) return null;
    const near = ((to - from) / (width - LABEL)) * 2, time = timeAt(px);
    const item = lane.items[firstAt(lane.items, time - near)];
    return item && item.a <= time + near ? item : null;
  }
  function describe(item) {
    if (!item.span) return [element("h3", { textContent: item.text }), factList([["nodes", String(item.graph.nodes)], ["takes", timeText(item.graph.seconds)], ["exposed", timeText(item.graph.exposed_seconds)]])];
    const text = item.colour === "exposed" ? `compute waits ${timeText(item.b - item.a)} for ${item.span.name}` : item.text;
    return [element("h3", { textContent: text }), factList(spanFacts(item.span, side))];
  }
  function choose(item) {
    chosen = item.span ?? null;
    const parts = describe(item), source = item.span && SOURCE_AT.get(item.span.where);
    if (source) parts.push(element("p", {}, "In the source: ", placeOf(source)));
    detail.replaceChildren(...parts);
  }
  function step(direction, exposedOnly) {
    const items = lanes[exposedOnly ? 3 : 2].items;
    if (!items.length) return;
    const now = items.findIndex((item) => item.span === chosen);
    const item = now >= 0 ? items[(now + direction + items.length) % items.length] : items[firstAt(items, from)] ?? items[0];
    choose(item);
    if (item.a < from || item.b > to || item.b - item.a < (to - from) / 60) { const room = Math.max((item.b - item.a) * 8, 2000); look((item.a + item.b) / 2 - room, (item.a + item.b) / 2 + room); } else draw();
  }
  let drag = null;
  canvas.onpointerdown = (event) => {
    const y = event.clientY - canvas.getBoundingClientRect().top;
    drag = { x: event.clientX, from, to, moved: false, overview: y < OVERVIEW };
    canvas.setPointerCapture(event.pointerId);
  };
  canvas.onpointermove = (event) => {
    if (drag) {
      const by = event.clientX - drag.x, scale = (drag.overview ? -length : drag.to - drag.from) / (width - LABEL);
      if (Math.abs(by) > 3) { drag.moved = true; canvas.classList.add("dragging"); }
      if (drag.moved) look(drag.from - by * scale, drag.to - by * scale);
      tip.hidden = true;
      return;
    }
    const item = itemAt(event);
    tip.hidden = !item;
    if (!item) return;
    tip.replaceChildren(...describe(item));
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 6))}px`;
    tip.style.top = `${event.clientY + 18 + box.height > innerHeight ? Math.max(4, event.clientY - box.height - 12) : event.clientY + 18}px`;
  };
  canvas.onpointerup = (event) => {
    const was = drag;
    drag = null;
    canvas.classList.remove("dragging");
    if (!was || was.moved) return;
    if (was.overview) {
      const at = ((event.clientX - canvas.getBoundingClientRect().left - LABEL) / (width - LABEL)) * length;
      return look(at - (to - from) / 2, at + (to - from) / 2);
    }
    const item = itemAt(event);
    if (item) { choose(item); draw(); }
  };
  canvas.onpointerleave = () => { tip.hidden = true; };
  canvas.ondblclick = (event) => { const item = itemAt(event); if (item) look(item.a - (item.b - item.a), item.b + (item.b - item.a)); };
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) {
      if (Math.abs(event.deltaX) <= Math.abs(event.deltaY)) return;
      event.preventDefault();
      const by = (event.deltaX / (width - LABEL)) * (to - from);
      return look(from + by, to + by);
    }
    event.preventDefault();
    zoom(Math.exp(event.deltaY * .004), Math.min(Math.max(timeAt(event.clientX - canvas.getBoundingClientRect().left), from), to));
  }, { passive: false });
  canvas.onkeydown = (event) => {
    const by = (to - from) / 8;
    const act = { ArrowLeft: () => look(from - by, to - by), ArrowRight: () => look(from + by, to + by), "+": () => zoom(1 / 1.6), "=": () => zoom(1 / 1.6), "-": () => zoom(1.6), 0: () => look(0, length),
      n: () => step(1), p: () => step(-1), e: () => step(1, true), E: () => step(-1, true), Escape: () => { tip.hidden = true; } }[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  };
  new ResizeObserver(draw).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readTheme(); draw(); });
  readTheme();
  return { draw: () => { read(); draw(); } };
}

// The page -------------------------------------------------------------------------------------------------------------------

window.addEventListener("error", (event) => {
  main.prepend(element("p", { className: "failure", role: "alert", textContent: `This page has a defect: ${event.message} (line ${event.lineno})` }));
});

const timeline = makeTimeline(), bars = makeBars(), source = makeSource(), tables = makeTables();
source.leadTo(tables.find((table) => table.id === "collectives"));
function drawAll() {
  for (const part of [timeline, bars, source, ...tables]) part.draw();
}
if (SIDES.length > 1) {
  navigation.append(choice("backend", "side", SIDES.map((side) => [side.name, side.name]), () => { state.set("view", ""); drawAll(); }));
}
drawAll();
document.querySelector(".skip").onclick = (event) => { event.preventDefault(); main.focus(); };
addEventListener("hashchange", () => location.reload());
const wanted = document.getElementById(state.get("at"));
if (wanted) goTo(wanted.querySelector("h2"), "instant");
/* How long the page took to open, its layout included, for the benchmark and for whoever asks. */
document.body.getBoundingClientRect();
document.documentElement.dataset.openedMs = performance.now().toFixed(0);
