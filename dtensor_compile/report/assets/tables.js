/* The tables: breaks, recompiles, redistributions, collectives, and what was decided. */

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
  module: {
    name: "module",
    title: "module",
    of: (row) => row.module,
    className: "mono module",
    show: (value) => breakable(value),
  },
  phase: { name: "phase", title: "phase", of: (row) => row.phase },
  bytes: { name: "bytes", title: "bytes", number: true, bar: true, of: (row) => row.bytes, show: exact },
  time: { name: "time", title: "time", number: true, bar: true, of: (row) => row.seconds, show: timeText },
  exposed: { name: "exposed", title: "exposed", number: true, bar: true, of: (row) => row.exposed_seconds, show: timeText },
};
const tag = (text, className = "") => element("span", { className: `tag ${className}`, textContent: text });
function prose(...parts) {
  return element(
    "div",
    { className: "prose" },
    ...parts
      .filter(([, text]) => text)
      .map(([name, text]) => element("p", {}, element("b", { textContent: `${name} ` }), text)),
  );
}
/** What rows that leave something alone cost together, as far as it is known; empty for other rows. */
function leftAlone(rows) {
  if (!rows[0].left_alone) return "";
  const known = (name) => rows.filter((row) => row[name] > 0);
  const costs = [
    known("seconds").length ? timeText(sum(known("seconds"), (row) => row.seconds)) : "",
    known("bytes").length ? bytesText(sum(known("bytes"), (row) => row.bytes)) : "",
  ].filter(Boolean);
  return `left alone${costs.length ? ` (${costs.join(", ")})` : ""}:`;
}
const layerKey = (row, ...values) => [row.source.key, anyLayer(row.module ?? ""), ...values].join("\u0000");

function makeTables() {
  const missedOrDecided = [
    COLUMNS.times,
    { name: "what", title: "what", of: (row) => row.kind, show: (value) => tag(value) },
    COLUMNS.line,
    {
      name: "change",
      title: "change",
      of: (row) => (row.before === row.after ? row.before : `${row.before} \u2192 ${row.after}`),
      className: "mono brief",
    },
    {
      name: "why",
      title: "why",
      of: (row) => (row.left_alone ? `left alone: ${row.reason}` : row.reason),
      show: (value, row, rows) => prose([leftAlone(rows), rows.length > 1 ? rows[0].reason : row.reason]),
    },
  ];
  const decisionKey = (row) =>
    [row.kind, row.source.key, row.before, row.after, row.reason.replace(/[\d.]+/g, "")].join("\u0000");
  return [
    new Grid(
      "breaks",
      "Graph breaks",
      "Where a graph ends: what was called there, why that ends it, and how to write it instead. " +
        "Collectives before and behind a break cannot be planned together.",
      {
        rows: () => sideNow().breaks,
        sort: "-collectives",
        none: "None: each function is one graph.",
        columns: [
          {
            name: "cause",
            title: "cause",
            of: (row) => `${row.error ? "error " : ""}${row.cause} ${row.title}`,
            show: (value, row) =>
              element(
                "div",
                { className: "cause" },
                tag(row.cause, "worse"),
                element("p", { textContent: row.title }),
                element("p", {
                  className: "quiet",
                  textContent: `${row.error ? "ends the compilation; " : ""}breaks under: ${row.breaks_under}`,
                }),
              ),
          },
          {
            name: "line",
            title: "line",
            of: (row) => row.source.key,
            show: (value, row) =>
              element(
                "div",
                { className: "code" },
                placeOf(row.source),
                windowOf(row.source),
                element("p", { className: "quiet" }, "called: ", element("code", { textContent: row.called })),
              ),
          },
          {
            name: "why",
            title: "why, and what instead",
            of: (row) => `${row.why} ${row.instead} ${row.message}`,
            show: (value, row) =>
              element(
                "div",
                {},
                prose(["Why:", row.why], ["Instead:", row.instead]),
                element(
                  "details",
                  {},
                  element("summary", { textContent: "Dynamo's words" }),
                  element("pre", { className: "window", textContent: row.message }),
                ),
              ),
          },
          { name: "times", title: "met", number: true, of: (row) => row.count },
          { name: "graphs", title: "graphs", number: true, of: (row) => row.graphs },
          {
            name: "collectives",
            title: "before + behind",
            number: true,
            of: (row) => row.collectives_before + row.collectives_after,
            show: (value, row) => `${row.collectives_before} + ${row.collectives_after}`,
          },
        ],
      },
    ),
    new Grid("recompiles", "Recompiles", "What was compiled again, and the guard that did not hold.", {
      rows: () => sideNow().recompiles,
      sort: "-seconds",
      none: "None.",
      columns: [
        { name: "function", title: "function", of: (row) => row.function, className: "mono" },
        COLUMNS.line,
        { name: "cause", title: "cause", of: (row) => row.cause, show: (value) => tag(value) },
        {
          name: "guard",
          title: "guard that did not hold",
          of: (row) => row.reason,
          show: (value) => element("pre", { className: "window", textContent: value.trim() }),
        },
        { name: "seconds", title: "measured", number: true, bar: true, of: (row) => row.measured_seconds, show: timeText },
      ],
    }),
    new Grid(
      "redistributions",
      "Redistributions",
      "Each change of placement, what forced it, and what became of it: bytes as captured and as sent in the end. " +
        "Equal layers are one row.",
      {
        rows: () => sideNow().redistributions,
        sort: "-bytes",
        none: "None are known: the graphs of stock torch hold collectives only, and a program without DTensors has none.",
        groupKey: (row) =>
          layerKey(row, row.before, row.after, row.phase, row.shape, row.dtype, row.plan, row.fate, row.operator),
        columns: [
          COLUMNS.times,
          COLUMNS.line,
          COLUMNS.module,
          {
            name: "change",
            title: "change",
            of: (row) => `${row.before}->${row.after} ${row.phase}`,
            className: "change",
            show: (value, row) =>
              element(
                "div",
                {},
                element("code", { textContent: `${row.before} \u2192 ${row.after}` }),
                element("div", { className: "quiet", textContent: row.phase }),
              ),
          },
          { name: "captured", title: "captured", number: true, of: (row) => row.bytes_before, show: exact },
          { ...COLUMNS.bytes, title: "sent" },
          COLUMNS.time,
          COLUMNS.exposed,
          {
            name: "why",
            title: "why",
            of: (row) => (row.explicit ? "explicit" : `implicit ${row.operator}`),
            show: (value, row) =>
              row.explicit
                ? "explicit"
                : element("span", {}, "implicit, for ", element("code", { textContent: row.operator })),
            className: "brief",
          },
          {
            name: "fate",
            title: "what became of it",
            of: (row) => `${row.fate} ${row.decided_by} ${row.reason}`,
            className: "brief",
            show: (value, row) =>
              element(
                "span",
                { title: row.reason },
                row.fate,
                row.decided_by ? ` by ${row.decided_by}` : "",
                row.fate === "sent" ? "" : element("div", { className: "quiet", textContent: row.reason }),
              ),
          },
          {
            name: "plan",
            title: "plan",
            of: (row) => row.plan,
            className: "mono",
            show: (value) =>
              element("span", { title: value, textContent: value.split(" ")[0] }),
          },
          { name: "shape", title: "shape", of: (row) => `[${row.shape}]\n${row.dtype}`, className: "mono shape" },
        ],
      },
    ),
    new Grid("collectives", "Collectives", "What is sent in the end, those that the program calls itself included.", {
      rows: () => sideNow().collectives,
      sort: "-exposed",
      none: "None.",
      groupKey: (row) => layerKey(row, row.kind, row.mesh_dim, row.phase, row.shape, row.dtype),
      columns: [
        COLUMNS.times,
        { name: "kind", title: "collective", of: (row) => `${row.kind}[${row.mesh_dim}]`, className: "mono" },
        COLUMNS.line,
        COLUMNS.bytes,
        COLUMNS.time,
        COLUMNS.exposed,
        COLUMNS.module,
        COLUMNS.phase,
        { name: "shape", title: "local input", of: (row) => `[${row.shape}]\n${row.dtype}`, className: "mono shape" },
        { name: "ranks", title: "ranks", of: (row) => String(row.ranks), className: "number" },
        { name: "from", title: "comes from", of: (row) => (row.redistribution < 0 ? "the program" : "a redistribution") },
      ],
    }),
    new Grid(
      "missed",
      "What did not happen, and why",
      "Collectives that are not hidden, not merged, or not run in pieces beside a matmul.",
      {
        rows: () => sideNow().missed,
        sort: "what",
        none: "Nothing.",
        groupKey: decisionKey,
        columns: missedOrDecided,
      },
    ),
    new Grid("decisions", "What was decided", "What the passes and the lowering did to the graphs.", {
      rows: () => sideNow().decisions,
      sort: "what",
      none: "Nothing is known.",
      groupKey: decisionKey,
      columns: missedOrDecided,
    }),
    ...(SIDES.some((side) => side.stages.length) ? compileTimes() : []),
  ];
}

/** Compile time by stage and by layer, where it was measured. */
function compileTimes() {
  const measured = { name: "seconds", title: "measured", number: true, bar: true, of: (row) => row.measured_seconds, show: timeText };
  const text = (name) => ({ name, title: name, of: (row) => row[name] });
  return [
    new Grid("stages", "Compile time by stage", "Each interval counts for the innermost phase that was under way.", {
      rows: () => sideNow().stages,
      sort: "-seconds",
      none: "It was not measured.",
      columns: [text("stage"), { ...text("part"), className: "mono" }, { ...text("count"), number: true }, measured],
    }),
    new Grid("layers", "Compile time by layer", "The part of a stage that was spent for one layer.", {
      rows: () => sideNow().layers,
      sort: "-seconds",
      none: "It was not measured.",
      columns: [{ ...text("layer"), className: "mono" }, text("stage"), measured],
    }),
  ];
}
