/* The timeline: streams of compute and communication, drawn on a canvas. */

const KIND_COLOUR = [
  ["all_gather", "gather"],
  ["reduce_scatter", "scatter"],
  ["all_reduce", "reduce"],
  ["all_to_all", "exchange"],
];
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
  const group = `${plural(collective.ranks, "rank")} of ${collective.mesh_dim}`;
  const hidden = exposed
    ? `${timeText(exposed)} exposed${exposed < seconds ? `, ${timeText(seconds - exposed)} hidden` : ""}`
    : "hidden behind compute";
  facts.push(
    [
      "bytes",
      `${exactBytes(collective.bytes)}  ([${collective.shape}] ${collective.dtype}, ${group})`,
    ],
    ["cost", hidden],
  );
  const cause = side.redistributions[collective.redistribution];
  if (cause)
    facts.push(
      ["why", `${cause.before} \u2192 ${cause.after}, ${cause.explicit ? "asked for" : `for ${cause.operator}`}`],
      ["plan", cause.plan],
    );
  return facts;
}
const factList = (facts) =>
  element(
    "dl",
    {},
    ...facts.flatMap(([name, text]) => [element("dt", { textContent: name }), element("dd", { textContent: text })]),
  );

function makeTimeline() {
  const part = section(
    "timeline",
    "Timeline",
    "One step on one rank: the graphs one after the other. Drag to move, Ctrl and the wheel to zoom; with the keyboard: " +
      "arrows, + and -, 0 for all, n and p for the next and the previous collective, e and E for exposed ones.",
  );
  const canvas = element("canvas", { tabIndex: 0, role: "img", "aria-label": "timeline of compute and communication" });
  const detail = element("div", { className: "detail", "aria-live": "polite" }),
    tip = document.getElementById("tip");
  const legend = element("p", { className: "legend" });
  const button = (text, label, act) => {
    const made = element("button", { type: "button", textContent: text, "aria-label": label });
    made.onclick = act;
    return made;
  };
  part.head.append(
    element(
      "div",
      { className: "choice" },
      button("\u2212", "zoom out", () => zoom(1.6)),
      button("+", "zoom in", () => zoom(1 / 1.6)),
      button("all", "show all", () => look(0, length)),
      button("next exposed", "next exposed collective", () => step(1, true)),
    ),
  );
  part.body.append(canvas, legend, detail);
  const LABEL = 118,
    AXIS = 22,
    LANE = 34,
    GAP = 8,
    OVERVIEW = 26;
  let side,
    lanes,
    length,
    from,
    to,
    chosen = null,
    theme = {},
    width = 0;

  function readTheme() {
    const style = getComputedStyle(document.documentElement);
    for (const name of [
      "page",
      "panel",
      "line",
      "text",
      "quiet",
      "ink",
      "focus",
      "exposed",
      "compute",
      "gather",
      "scatter",
      "reduce",
      "exchange",
      "other",
    ])
      theme[name] = style.getPropertyValue(`--${name}`).trim();
  }
  function read() {
    side = sideNow();
    length = Math.max(side.length, ...side.spans.map((span) => span.end).slice(-1), 1);
    const item = (span, a, b, colour, text) => ({ span, a, b, colour, text });
    const compute = [],
      communication = [],
      waits = [];
    for (const span of side.spans) {
      length = Math.max(length, span.end);
      if (span.collective < 0) {
        compute.push(item(span, span.begin, span.end, "compute", span.name));
        continue;
      }
      const collective = side.collectives[span.collective];
      communication.push(item(span, span.begin, span.end, colourOf(span.name), `${span.name}[${collective.mesh_dim}]`));
      if (collective.exposed_seconds > 0)
        waits.push(item(span, span.end - collective.exposed_seconds, span.end, "exposed", "waits"));
    }
    const graphs = side.graphs.map((graph) => ({
      graph,
      a: graph.begin,
      b: graph.begin + graph.seconds,
      colour: "other",
      text: `${graph.phase} ${graph.function}`,
    }));
    lanes = [
      ["graphs", graphs],
      ["compute", compute],
      ["communication", communication],
      ["exposed", waits],
    ].map(([name, items]) => ({ name, items: items.sort((a, b) => a.a - b.a) }));
    const [a, b] = state.get("view").split("-").map(Number);
    [from, to] = b > a && a >= 0 && b <= length * 1.001 ? [a, b] : [0, length];
    chosen = null;
    detail.replaceChildren(...summary());
    const kinds = [...new Set(side.collectives.map((row) => row.kind))].map((kind) => [kind, colourOf(kind)]);
    legend.replaceChildren(
      ...[["compute", "compute"], ...kinds, ["exposed: compute waits", "exposed"]].map(([text, colour]) => {
        const swatch = element("i");
        swatch.style.background = `var(--${colour})`;
        return element("span", {}, swatch, text);
      }),
    );
  }
  function summary() {
    const rows = side.graphs.map((graph, i) => [
      `graph ${i}`,
      `${graph.phase} of ${graph.function || "a function"}: ${plural(graph.nodes, "node")}, ` +
        `compute ${timeText(graph.compute_seconds)}, communication ${timeText(graph.communication_seconds)}, ` +
        `exposed ${timeText(graph.exposed_seconds)}`,
    ]);
    return [
      element("p", {
        className: "quiet",
        textContent: side.graphs.length ? "Point at a span, or click it to keep its details here." : "No graph was compiled.",
      }),
      factList(rows.slice(0, 12)),
    ];
  }
  const x = (time) => LABEL + ((time - from) / (to - from)) * (width - LABEL);
  const timeAt = (pixel) => from + ((pixel - LABEL) / (width - LABEL)) * (to - from);
  const laneTop = (i) => OVERVIEW + AXIS + i * (LANE + GAP);
  const height = OVERVIEW + AXIS + 4 * (LANE + GAP);
  /** First item that ends behind `time`. */
  function firstAt(items, time) {
    let low = 0,
      high = items.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (items[middle].b < time) low = middle + 1;
      else high = middle;
    }
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
    for (const [lane, top] of [
      [lanes[2], 3],
      [lanes[3], 12],
    ]) {
      for (const item of lane.items) {
        pen.fillStyle = theme[item.colour];
        pen.fillRect(LABEL + item.a * scale, top, Math.max((item.b - item.a) * scale, 0.5), 7);
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
    const rough = (to - from) / Math.max(2, (width - LABEL) / 120),
      power = 10 ** Math.floor(Math.log10(rough));
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
      const item = lane.items[i],
        left = x(item.a),
        wide = x(item.b) - left;
      pen.fillStyle = theme[item.colour];
      pen.fillRect(left, top, Math.max(wide > 4 ? wide - 1 : wide, 0.6), tall);
      const start = Math.max(left, LABEL),
        room = left + wide - start - 8;
      if (room > 22) {
        pen.fillStyle = theme.ink;
        const most = Math.floor(room / 7);
        pen.fillText(
          item.text.length > most ? `${item.text.slice(0, Math.max(most - 1, 1))}\u2026` : item.text,
          start + 4,
          top + tall / 2,
        );
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
    const least = 50,
      size = Math.min(Math.max(b - a, least), length),
      start = Math.min(Math.max(a, 0), length - size);
    [from, to] = [start, start + size];
    state.set("view", size >= length * 0.999 ? "" : `${Math.round(from)}-${Math.round(to)}`);
    draw();
  }
  function zoom(factor, around = (from + to) / 2) {
    look(around - (around - from) * factor, around + (to - around) * factor);
  }
  function itemAt(event) {
    const box = canvas.getBoundingClientRect(),
      px = event.clientX - box.left,
      py = event.clientY - box.top;
    const lane = lanes.find((_, i) => py >= laneTop(i) && py <= laneTop(i) + LANE);
    if (!lane || px < LABEL) return null;
    const near = ((to - from) / (width - LABEL)) * 2,
      time = timeAt(px);
    const item = lane.items[firstAt(lane.items, time - near)];
    return item && item.a <= time + near ? item : null;
  }
  function describe(item) {
    if (!item.span)
      return [
        element("h3", { textContent: item.text }),
        factList([
          ["nodes", String(item.graph.nodes)],
          ["takes", timeText(item.graph.seconds)],
          ["exposed", timeText(item.graph.exposed_seconds)],
        ]),
      ];
    const text = item.colour === "exposed" ? `compute waits ${timeText(item.b - item.a)} for ${item.span.name}` : item.text;
    return [element("h3", { textContent: text }), factList(spanFacts(item.span, side))];
  }
  function choose(item) {
    chosen = item.span ?? null;
    const parts = describe(item),
      source = item.span && SOURCE_AT.get(item.span.where);
    if (source) parts.push(element("p", {}, "In the source: ", placeOf(source)));
    detail.replaceChildren(...parts);
  }
  function step(direction, exposedOnly) {
    const items = lanes[exposedOnly ? 3 : 2].items;
    if (!items.length) return;
    const now = items.findIndex((item) => item.span === chosen);
    const item =
      now >= 0 ? items[(now + direction + items.length) % items.length] : (items[firstAt(items, from)] ?? items[0]);
    choose(item);
    if (item.a < from || item.b > to || item.b - item.a < (to - from) / 60) {
      const room = Math.max((item.b - item.a) * 8, 2000);
      look((item.a + item.b) / 2 - room, (item.a + item.b) / 2 + room);
    } else draw();
  }
  let drag = null;
  canvas.onpointerdown = (event) => {
    const y = event.clientY - canvas.getBoundingClientRect().top;
    drag = { x: event.clientX, from, to, moved: false, overview: y < OVERVIEW };
    canvas.setPointerCapture(event.pointerId);
  };
  canvas.onpointermove = (event) => {
    if (drag) {
      const by = event.clientX - drag.x,
        scale = (drag.overview ? -length : drag.to - drag.from) / (width - LABEL);
      if (Math.abs(by) > 3) {
        drag.moved = true;
        canvas.classList.add("dragging");
      }
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
    const below = event.clientY + 18;
    tip.style.top = `${below + box.height > innerHeight ? Math.max(4, event.clientY - box.height - 12) : below}px`;
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
    if (item) {
      choose(item);
      draw();
    }
  };
  canvas.onpointerleave = () => {
    tip.hidden = true;
  };
  canvas.ondblclick = (event) => {
    const item = itemAt(event);
    if (item) look(item.a - (item.b - item.a), item.b + (item.b - item.a));
  };
  canvas.addEventListener(
    "wheel",
    (event) => {
      if (!event.ctrlKey && !event.metaKey) {
        if (Math.abs(event.deltaX) <= Math.abs(event.deltaY)) return;
        event.preventDefault();
        const by = (event.deltaX / (width - LABEL)) * (to - from);
        return look(from + by, to + by);
      }
      event.preventDefault();
      zoom(
        Math.exp(event.deltaY * 0.004),
        Math.min(Math.max(timeAt(event.clientX - canvas.getBoundingClientRect().left), from), to),
      );
    },
    { passive: false },
  );
  canvas.onkeydown = (event) => {
    const by = (to - from) / 8;
    const act = {
      ArrowLeft: () => look(from - by, to - by),
      ArrowRight: () => look(from + by, to + by),
      "+": () => zoom(1 / 1.6),
      "=": () => zoom(1 / 1.6),
      "-": () => zoom(1.6),
      0: () => look(0, length),
      n: () => step(1),
      p: () => step(-1),
      e: () => step(1, true),
      E: () => step(-1, true),
      Escape: () => {
        tip.hidden = true;
      },
    }[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  };
  new ResizeObserver(draw).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    readTheme();
    draw();
  });
  readTheme();
  return {
    draw: () => {
      read();
      draw();
    },
  };
}
