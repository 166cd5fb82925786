/* Lines of the program, and tables that can be searched and sorted. */

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
  const before = source.before ? source.before.split("\n") : [],
    after = source.after ? source.after.split("\n") : [];
  const near =
    [...before]
      .reverse()
      .concat(after)
      .find((line) => line.trim()) ?? "";
  const indent = /^\s/.test(source.code) ? "" : near.slice(0, near.length - near.trimStart().length);
  [...before, indent + source.code, ...after].forEach((line, i) => {
    const number = String(source.line - before.length + i).padStart(5);
    pre.append(
      element("span", { className: i === before.length ? "here" : "quiet", textContent: `${number}  ${line}` }),
      "\n",
    );
  });
  return pre;
}

const SHOWN = 100;

/** A table that can be searched and sorted. Rows with the same `groupKey` are one row, whose numbers are added up.
    A column has a name, a title, `of(row)` as text or number, and maybe `show(value, row, rows)` for what stands in the cell. */
class Grid {
  constructor(id, title, note, { rows, columns, groupKey = null, sort, none }) {
    Object.assign(this, { id, rows, columns, groupKey, none, order: sort });
    this.part = section(id, title, note, () => rows().length);
    this.seek = element("input", { type: "search", placeholder: "search", "aria-label": `search ${title}` });
    this.seek.oninput = () => {
      state.set(`${id}.q`, this.seek.value);
      this.limit = SHOWN;
      this.draw();
    };
    this.count = element("span", { className: "count", "aria-live": "polite" });
    this.part.head.append(this.seek);
    if (groupKey) {
      this.each = element("input", { type: "checkbox" });
      this.each.onchange = () => {
        state.set(`${id}.each`, this.each.checked ? "1" : "");
        this.draw();
      };
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
    found.forEach((row, i) => addTo(groups, this.groupKey && !state.get(`${this.id}.each`) ? this.groupKey(row) : i, row));
    const [, sign, name] = /^(-?)(.*)$/.exec(state.get(`${this.id}.sort`, this.order));
    const column = this.columns.find((column) => column.name === name);
    const made = [...groups.values()].map((rows) => ({ rows, values: this.columns.map((column) => valueOf(column, rows)) }));
    if (column) {
      const i = this.columns.indexOf(column),
        factor = sign ? -1 : 1;
      made.sort(
        (a, b) =>
          factor *
          (column.number
            ? a.values[i] - b.values[i]
            : String(a.values[i]).localeCompare(String(b.values[i]), "en", { numeric: true })),
      );
    }
    return { found: found.length, groups: made, sorted: column, falling: Boolean(sign) };
  }
  draw() {
    this.part.update();
    const { head, body } = this.part,
      all = this.rows();
    this.seek.value = state.get(`${this.id}.q`);
    if (this.each) this.each.checked = Boolean(state.get(`${this.id}.each`));
    for (const node of [...head.children].slice(1)) node.hidden = all.length === 0;
    if (all.length === 0) return body.replaceChildren(element("p", { className: "quiet", textContent: this.none }));
    const { found, groups, sorted, falling } = this.groups();
    this.count.textContent =
      found === all.length ? plural(all.length, "row") : `${found.toLocaleString("en")} of ${plural(all.length, "row")}`;
    if (groups.length < found) this.count.textContent += ` in ${groups.length.toLocaleString("en")}`;
    const largest = this.columns.map((column, i) =>
      column.number ? groups.reduce((most, group) => Math.max(most, group.values[i]), 0) : 0,
    );
    const header = element("tr", {}, ...this.columns.map((column) => this.header(column, column === sorted, falling)));
    const table = element(
      "table",
      {},
      element("thead", {}, header),
      element("tbody", {}, ...groups.slice(0, this.limit).map((group) => this.line(group, largest))),
    );
    body.replaceChildren(
      element("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": `table of ${this.id}` }, table),
    );
    if (groups.length > this.limit) {
      const more = element("button", { type: "button", textContent: `show all ${groups.length.toLocaleString("en")} rows` });
      more.onclick = () => {
        this.limit = Infinity;
        this.draw();
      };
      body.append(element("p", {}, more));
    }
  }
  header(column, sorted, falling) {
    const button = element("button", {
      type: "button",
      textContent: column.title + (sorted ? (falling ? " \u2193" : " \u2191") : ""),
    });
    button.onclick = () => {
      const down = sorted ? !falling : Boolean(column.number);
      state.set(`${this.id}.sort`, (down ? "-" : "") + column.name, this.order);
      this.draw();
      this.part.body.querySelector(`th[data-column="${column.name}"] button`).focus();
    };
    const cell = element(
      "th",
      { scope: "col", className: column.number ? "number" : "", "data-column": column.name },
      button,
    );
    if (sorted) cell.setAttribute("aria-sort", falling ? "descending" : "ascending");
    return cell;
  }
  line({ rows, values }, largest) {
    return element(
      "tr",
      {},
      ...this.columns.map((column, i) => {
        const cell = element("td", { className: column.number ? "number" : (column.className ?? "") });
        cell.append(column.show ? column.show(values[i], rows[0], rows) : String(values[i]));
        if (column.bar && largest[i]) cell.style.setProperty("--part", `${(100 * values[i]) / largest[i]}%`);
        return cell;
      }),
    );
  }
}
function valueOf(column, rows) {
  if (column.number) return sum(rows, column.of);
  const values = new Set(rows.map(column.of));
  return values.size === 1 ? [...values][0] : anyLayer(column.of(rows[0]));
}
