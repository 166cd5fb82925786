/* The page: its sections in order. */

window.addEventListener("error", (event) => {
  main.prepend(
    element("p", {
      className: "failure",
      role: "alert",
      textContent: `This page has a defect: ${event.message} (line ${event.lineno})`,
    }),
  );
});

const timeline = makeTimeline(),
  bars = makeBars(),
  source = makeSource(),
  tables = makeTables();
source.leadTo(tables.find((table) => table.id === "collectives"));
function drawAll() {
  for (const part of [timeline, bars, source, ...tables]) part.draw();
}
if (SIDES.length > 1) {
  navigation.append(
    choice(
      "backend",
      "side",
      SIDES.map((side) => [side.name, side.name]),
      () => {
        state.set("view", "");
        drawAll();
      },
    ),
  );
}
drawAll();
document.querySelector(".skip").onclick = (event) => {
  event.preventDefault();
  main.focus();
};
addEventListener("hashchange", () => location.reload());
const wanted = document.getElementById(state.get("at"));
if (wanted) goTo(wanted.querySelector("h2"), "instant");
/* How long the page took to open, its layout included, for the benchmark and for whoever asks. */
document.body.getBoundingClientRect();
document.documentElement.dataset.openedMs = performance.now().toFixed(0);
