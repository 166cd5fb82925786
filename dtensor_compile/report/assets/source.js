/* The source with its costs in the margin. */

let showLine = () => {};

function makeSource() {
  const part = section(
    "source",
    "Source",
    "Lines that send, compute or break, with what each costs. A figure in the margin leads to its collectives.",
  );
  let lines = new Map(),
    collectiveTable = null;
  const draw = () => {
    const side = sideNow(),
      costs = new Map(),
      breaks = new Map();
    const cost = (key) => costs.get(key) ?? costs.set(key, { bytes: 0, time: 0, exposed: 0, compute: 0, count: 0 }).get(key);
    for (const row of side.collectives) {
      const at = cost(row.source.key);
      at.bytes += row.bytes;
      at.time += row.seconds;
      at.exposed += row.exposed_seconds;
      at.count += 1;
    }
    for (const span of side.spans) if (span.collective < 0) cost(span.where).compute += span.seconds;
    for (const row of side.breaks) addTo(breaks, row.source.key, row);
    const largest = { bytes: 0, time: 0, exposed: 0, compute: 0 };
    for (const [key, value] of costs)
      if (key) for (const name of Object.keys(largest)) largest[name] = Math.max(largest[name], value[name]);
    lines = new Map();
    const files = DATA.files.map((file) => {
      const keys = file.excerpts.flatMap(([first, text]) => text.map((_, i) => `${file.name}:${first + i}`));
      const here = keys.map((key) => costs.get(key)).filter(Boolean);
      return {
        ...file,
        bytes: sum(here, (c) => c.bytes),
        exposed: sum(here, (c) => c.exposed),
        broken: sum(keys, (key) => breaks.get(key)?.length ?? 0),
      };
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
    const titles = ["bytes", "time", "exposed", "compute"].map((title) =>
      element("th", { scope: "col", className: "number", textContent: title }),
    );
    const table = element(
      "table",
      {},
      element(
        "thead",
        {},
        element(
          "tr",
          {},
          ...titles,
          element("th", { scope: "col", textContent: "" }),
          element("th", { scope: "col", textContent: "" }),
        ),
      ),
      body,
    );
    const broken = file.broken ? `, ${plural(file.broken, "graph break")}` : "";
    const about = ` ${bytesText(file.bytes)} sent, ${timeText(file.exposed)} exposed${broken}`;
    return element(
      "details",
      { className: "file", open: true },
      element(
        "summary",
        {},
        element("b", { className: "mono", textContent: file.name }),
        element("span", { className: "quiet", textContent: about }),
      ),
      element("div", { className: "lines", tabIndex: 0, role: "region", "aria-label": file.name }, table),
    );
  };
  const lineOf = (key, number, code, costs, breaks, largest) => {
    const cost = costs.get(key),
      broken = breaks.get(key) ?? [];
    const figures = [
      ["bytes", bytesText],
      ["time", timeText],
      ["exposed", timeText],
      ["compute", timeText],
    ].map(([name, text]) => {
      const cell = element("td", { className: "number" });
      if (!cost || !cost[name]) return cell;
      cell.style.setProperty("--part", `${(100 * cost[name]) / largest[name]}%`);
      if (name !== "bytes") {
        cell.textContent = text(cost[name]);
        return cell;
      }
      const button = element("button", {
        type: "button",
        className: "place",
        textContent: text(cost[name]),
        title: `${exactBytes(cost.bytes)} bytes in ${plural(cost.count, "collective")}`,
      });
      button.onclick = () => {
        state.set("collectives.q", key);
        collectiveTable.draw();
        goTo(collectiveTable.part.heading);
      };
      cell.append(button);
      return cell;
    });
    const text = element("td", { className: "code", textContent: code || " " });
    for (const row of broken) text.append(tag(`breaks: ${row.cause}`));
    const line = element(
      "tr",
      { className: `${cost?.count ? "costs" : ""} ${broken.length ? "breaks" : ""}`, tabIndex: -1 },
      ...figures,
      element("td", { className: "at", textContent: number }),
      text,
    );
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
  return {
    draw,
    leadTo: (table) => {
      collectiveTable = table;
    },
  };
}
