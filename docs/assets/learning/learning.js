// "Watch a layer learn": two layers learn the same scenes from the same weights, one with routing and one with uniform
// coupling. The numbers come from layer.js. The script fills the element of the class "learning".
import { PARTS, TEST_SCENES, WHOLES, forward, measure, meanAndDeviation, race } from "./layer.js";
import { arrow, button, choice, draw, make, number } from "./drawing.js";

const LAST = 300, PER_FRAME = 2; // steps of a training; steps between two pictures
const SEEDS = 20;
const percent = (share) => `${(100 * share).toFixed(1)} %`;
const spread = (numbers, unit) => meanAndDeviation(numbers).map(unit).join(" ± ").replace(" %", "");

function learning(place) {
  const dials = { rate: 1, iterations: 3, noise: 0.1, distractors: 2 };
  let seed = 0, shown = 0, running = false, run, history;

  // ---- controls ----

  const dial = (label, name, values) => choice(label, values, dials[name], (value) => restart({ [name]: Number(value) }));
  const play = button("▶ Train", toggle);
  const controls = [
    dial("Learning rate", "rate", [0.1, 0.3, 1, 3, 10]), dial("Iterations", "iterations", [1, 2, 3]),
    dial("Noise", "noise", [0, 0.1, 0.2, 0.4]), dial("Distractors", "distractors", [0, 1, 2, 3]),
  ];
  const buttons = [
    play, button("One step", oneStep), button("New weights", () => restart({}, seed + 1)),
    button("Next scene", () => show((shown + 1) % TEST_SCENES)), make("output", { class: "steps" }),
  ];
  const scene = draw("svg", { class: "scene", role: "img", viewBox: "-1.7 -1.7 3.4 3.4" }), told = make("p", { class: "told" });
  const curves = ["Accuracy", "Loss"].map(curve);
  const sides = [0, 1].map(side);
  const repeat = button(`Measure ${SEEDS} seeds here`, measureHere), measured = make("p", { class: "measured", "aria-live": "polite" });
  place.replaceChildren(
    make("div", { class: "controls" }, ...controls), make("div", { class: "controls" }, ...buttons),
    make("div", { class: "above" }, make("figure", {}, scene, told), ...curves.map(({ figure }) => figure)),
    make("div", { class: "sides" }, ...sides.map(({ section }) => section)),
    make("div", { class: "controls" }, repeat), measured,
  );

  function curve(name) {
    const svg = draw("svg", { class: "curve", role: "img", viewBox: "0 0 230 140" }), caption = make("figcaption", {}, make("strong", {}, name));
    return { svg, figure: make("figure", {}, caption, svg) };
  }

  function side(n) {
    const title = make("h3"), says = make("p", { class: "says" });
    const planes = WHOLES.map((whole) => {
      const svg = draw("svg", { role: "img" }), length = make("output");
      return { svg, length, figure: make("figure", {}, make("figcaption", {}, make("strong", {}, `Votes for the ${whole}`), " ", length), svg) };
    });
    return { title, says, planes, section: make("section", { class: `side side-${n}` }, title, says, make("div", { class: "planes" }, ...planes.map(({ figure }) => figure))) };
  }

  // ---- training ----

  function restart(changes = {}, newSeed = seed) {
    pause();
    Object.assign(dials, changes);
    seed = newSeed;
    run = race(seed, [dials.iterations, 1], dials);
    history = [{ steps: 0, results: run.results() }];
    measured.textContent = "";
    show(shown);
  }

  function advance(steps) {
    for (let n = 0; n < steps; n++) run.advance(dials.rate);
    history.push({ steps: run.steps, results: run.results() });
    show(shown);
  }

  function oneStep() {
    pause();
    advance(1);
  }

  function frame() {
    if (!running) return;
    advance(PER_FRAME);
    if (run.steps >= LAST) pause();
    else setTimeout(() => requestAnimationFrame(frame), 30);
  }

  function toggle() {
    if (running) return pause();
    if (run.steps >= LAST) restart();
    running = true;
    play.textContent = "Pause";
    frame();
  }

  function pause() {
    running = false;
    play.textContent = "▶ Train";
  }

  // ---- display ----

  function show(index) {
    shown = index;
    const { poses, label, isDistractor } = run.test[shown], strangers = isDistractor.filter(Boolean).length;
    place.querySelector(".steps").textContent = `step ${run.steps} of ${LAST}`;
    told.textContent = `Scene ${shown + 1}: a ${WHOLES[label]}${strangers ? `. ${strangers} of its ${PARTS} parts, drawn faint, belong to other wholes` : ""}.`;
    scene.setAttribute("aria-label", told.textContent);
    drawSceneOf(poses, isDistractor);
    const answers = run.layers.map(({ weights, iterations }) => forward(weights, poses, iterations));
    const reach = 1.1 * Math.max(1, ...answers.flatMap(({ votes }) => [...votes].map(Math.abs)));
    sides.forEach((one, n) => showSide(one, n, answers[n], reach, run.test[shown]));
    showCurve(curves[0].svg, "accuracy", [0, 1], percent, 1 / WHOLES.length);
    showCurve(curves[1].svg, "loss", [0, 0.5], (loss) => loss.toFixed(2));
  }

  function drawSceneOf(poses, isDistractor) {
    const at = (i) => [poses[4 * i], -poses[4 * i + 1]], own = [...isDistractor.keys()].filter((i) => !isDistractor[i]);
    const outline = draw("polygon", { class: "outline", points: own.map(at).join(" ") });
    const parts = [...isDistractor].map((is, i) => {
      const [x, y] = at(i), made = arrow(`input-${i}`, [0.4 * poses[4 * i + 2], 0.4 * poses[4 * i + 3]], 0.07);
      made.setAttribute("transform", `translate(${x}, ${y})`);
      made.classList.toggle("stranger", is);
      return made;
    });
    scene.replaceChildren(outline, ...parts);
  }

  function showSide({ title, says, planes }, n, { votes, coupling, capsules, lengths }, reach, { label, isDistractor }) {
    const { accuracy, loss, winner } = history.at(-1).results[n], answer = lengths.indexOf(Math.max(...lengths)), iterations = run.layers[n].iterations;
    title.textContent = n === 0 ? `Routing, ${iterations} iteration${iterations > 1 ? "s" : " (so uniform, too)"}` : "Without routing: uniform coupling";
    says.textContent = `Accuracy ${percent(accuracy)}, loss ${loss.toFixed(3)}, longer capsule ${number(winner)} on average. Here: ${WHOLES[answer]}, ${answer === label ? "right" : "wrong"}.`;
    planes.forEach(({ svg, length, figure }, j) => {
      svg.setAttribute("viewBox", `${-reach} ${-reach} ${2 * reach} ${2 * reach}`);
      const drawn = Array.from({ length: PARTS }, (_, i) => {
        const at = i * WHOLES.length + j;
        const vote = arrow(`input-${i}`, [votes[2 * at], votes[2 * at + 1]], reach * (0.004 + 0.05 * coupling[at]), 0.05 * reach);
        vote.classList.toggle("stranger", isDistractor[i]);
        return vote;
      });
      const capsule = arrow("capsule", [capsules[2 * j], capsules[2 * j + 1]], 0.035 * reach, 0.05 * reach);
      svg.replaceChildren(
        draw("path", { class: "axes", d: `M${-reach},0H${reach}M0,${-reach}V${reach}` }), draw("circle", { class: "axes", r: 1 }), ...drawn, capsule);
      length.textContent = `length ${number(lengths[j])}`;
      svg.setAttribute("aria-label", `Five votes for the ${WHOLES[j]}; the capsule has length ${number(lengths[j])}`);
      figure.classList.toggle("right", j === label);
    });
  }

  // Draws one number of both layers after each step; values outside [low, high] lie on the edge.
  function showCurve(svg, name, [low, high], unit, chance = null) {
    const [left, right, top, bottom] = [44, 222, 8, 116];
    const x = (steps) => left + ((right - left) * steps) / Math.max(LAST, run.steps);
    const y = (value) => bottom - ((bottom - top) * (Math.min(Math.max(value, low), high) - low)) / (high - low);
    const ticks = [low, (low + high) / 2, high].flatMap((value) => [
      draw("line", { class: "grid", x1: left, x2: right, y1: y(value), y2: y(value) }),
      draw("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, unit(value).replace(".0 %", " %")),
    ]);
    const points = (n) => history.map(({ steps, results }) => `${x(steps)},${y(results[n][name])}`).join(" ");
    const [routed, uniform] = history.at(-1).results.map((result) => unit(result[name]));
    svg.replaceChildren(
      ...ticks, ...(chance === null ? [] : [
        draw("line", { class: "chance", x1: left, x2: right, y1: y(chance), y2: y(chance) }),
        draw("text", { x: right, y: y(chance) + 14, "text-anchor": "end" }, "chance"),
      ]),
      draw("text", { x: right, y: 134, "text-anchor": "end" }, `${Math.max(LAST, run.steps)} steps`),
      ...[1, 0].map((n) => draw("polyline", { class: `line-${n}`, points: points(n) })));
    svg.setAttribute("aria-label", `${name} after ${run.steps} steps: ${routed} with routing, ${uniform} without`);
  }

  // ---- the same over many seeds ----

  async function measureHere() {
    pause();
    repeat.disabled = true;
    const { iterations, ...others } = dials, results = [];
    for (let n = 0; n < SEEDS; n++) {
      measured.textContent = `Seed ${n + 1} of ${SEEDS} …`;
      await new Promise((resolve) => setTimeout(resolve));
      results.push(...measure({ ...others, seeds: 1, first: n, steps: LAST, iterations: [iterations, 1] }));
    }
    const of = (name, unit) => [0, 1].map((n) => spread(results.map((each) => each[n][name]), unit));
    const [routed, uniform] = of("accuracy", percent), [loss, otherLoss] = of("loss", (x) => x.toFixed(3));
    const better = results.filter(([one, other]) => one.accuracy > other.accuracy).length;
    measured.textContent = `${SEEDS} seeds, ${LAST} steps: accuracy ${routed} with ${iterations} iteration${iterations > 1 ? "s" : ""}, ${uniform} without routing; `
      + `loss ${loss} and ${otherLoss}. Routing has more right answers with ${better} of ${SEEDS} seeds.`;
    repeat.disabled = false;
  }

  restart();
  place.learning = { advance, results: () => history.at(-1).results };
}

document.querySelectorAll(".learning").forEach(learning);
