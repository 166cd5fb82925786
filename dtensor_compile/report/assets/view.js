/* What is chosen, as it stands in the address, and the sections of the page. */

const state = {
  values: new URLSearchParams(location.hash.slice(1)),
  get(key, otherwise = "") {
    return this.values.get(key) ?? otherwise;
  },
  set(key, value, otherwise = "") {
    if (value === otherwise) this.values.delete(key);
    else this.values.set(key, value);
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
    button.onclick = () => {
      state.set(key, value, otherwise);
      show();
      changed();
    };
    return [value, button];
  });
  const show = () => {
    const known = buttons.some(([value]) => value === state.get(key)) ? state.get(key) : otherwise;
    for (const [value, button] of buttons) button.setAttribute("aria-pressed", String(value === known));
  };
  show();
  return element(
    "div",
    { className: "choice", role: "group", "aria-label": label },
    element("span", { textContent: label }),
    ...buttons.map(([, button]) => button),
  );
}

const main = document.getElementById("main"),
  navigation = document.querySelector("nav");

function goTo(node, behavior = "auto") {
  node.scrollIntoView({ behavior });
  node.focus({ preventScroll: true });
}
function section(id, title, note, count = null) {
  const heading = element("h2", { textContent: title, tabIndex: -1 });
  const head = element("div", { className: "head" }, heading);
  const body = element("div");
  const made = element(
    "section",
    { id, "aria-label": title },
    head,
    note ? element("p", { className: "note", textContent: note }) : null,
    body,
  );
  const number = element("span", { textContent: count === null ? "" : ` ${count()}` });
  const link = element("a", { href: `#at=${id}` }, title, number);
  link.onclick = (event) => {
    event.preventDefault();
    state.set("at", id);
    goTo(heading);
  };
  navigation.append(link);
  main.append(made);
  return {
    head,
    body,
    heading,
    update: () => {
      if (count) number.textContent = ` ${count()}`;
    },
  };
}
