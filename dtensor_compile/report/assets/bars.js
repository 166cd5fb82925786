/* Bytes and times by what collectives have in common. */

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
    const [, of] = BY[state.get("by")] ?? BY.module,
      [, measure, text] = METRIC[state.get("metric")] ?? METRIC.bytes;
    const sums = SIDES.map((side) => {
      const groups = new Map();
      for (const row of side.collectives) groups.set(of(row), (groups.get(of(row)) ?? 0) + measure(row));
      return groups;
    });
    const names = [...new Set(sums.flatMap((groups) => [...groups.keys()]))];
    const most = (name) => Math.max(...sums.map((groups) => groups.get(name) ?? 0));
    names.sort(
      (a, b) =>
        (sums[0].get(b) ?? 0) - (sums[0].get(a) ?? 0) || most(b) - most(a) || a.localeCompare(b, "en", { numeric: true }),
    );
    const largest = names.reduce((value, name) => Math.max(value, most(name)), 0),
      whole = sums.map((groups) => sum([...groups.values()], (value) => value));
    const bars = element("div", { className: "bars", role: "list" });
    for (const name of names.slice(0, limit)) {
      const values = sums.map((groups) => groups.get(name) ?? 0);
      const share = whole[0] ? `${((100 * values[0]) / whole[0]).toFixed(1)}%` : "";
      const pair = element(
        "div",
        { className: "pair", "aria-hidden": "true" },
        ...values.map((value, i) => {
          const bar = element("i", { className: i ? "stock" : "" });
          bar.style.width = `${largest ? (100 * value) / largest : 0}%`;
          return bar;
        }),
      );
      const figures = [
        element("b", { textContent: text(values[0]) }),
        element("span", { textContent: share }),
        element("span", { className: "quiet", textContent: SIDES[1] ? `${SIDES[1].name} ${text(values[1])}` : "" }),
      ];
      const row = element(
        "div",
        { role: "listitem" },
        element("div", { className: "name", textContent: name }),
        pair,
        ...figures,
      );
      row.style.display = "contents";
      bars.append(row);
    }
    const legend = element(
      "p",
      { className: "legend" },
      ...SIDES.map((side, i) => {
        const swatch = element("i");
        swatch.style.background = i ? "var(--stock)" : "var(--ours)";
        return element("span", {}, swatch, side.name);
      }),
    );
    const more = names.length > limit ? element("button", { type: "button", textContent: `show all ${names.length}` }) : null;
    if (more)
      more.onclick = () => {
        limit = Infinity;
        draw();
      };
    part.body.replaceChildren(
      names.length ? legend : element("p", { className: "quiet", textContent: "Nothing is sent." }),
      bars,
      element("p", {}, ...(more ? [more] : [])),
    );
  };
  part.head.append(
    choice(
      "by",
      "by",
      Object.entries(BY).map(([key, [title]]) => [key, title]),
      draw,
    ),
    choice(
      "show",
      "metric",
      Object.entries(METRIC).map(([key, [title]]) => [key, title]),
      draw,
    ),
  );
  return { draw };
}
