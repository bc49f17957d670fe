// Routing by agreement, by hand: input capsules vote for output capsules in the plane, and the page shows all numbers of
// each iteration. The script needs no server and no other script; the explorer and the documentation share it. It fills
// every element of the class "playground" and sets the element's property `playground` to { state, rounds, show }.
(() => {
  // ---- the routings. votes[i][j] = [x, y]; a round has logits b, coupling c, sums s, capsules v and agreement a ----

  const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
  const dot = (u, v) => sum(u.map((x, d) => x * v[d]));
  const length = (v) => Math.hypot(...v);
  const transposed = (rows) => rows[0].map((_, j) => rows.map((row) => row[j]));
  const everywhere = (votes, value) => votes.map((row) => row.map(value));

  function softmax(logits) {
    const largest = Math.max(...logits), powers = logits.map((b) => Math.exp(b - largest)), total = sum(powers);
    return powers.map((power) => power / total);
  }

  const compete = (logits, over) =>
    over === "outputs" ? logits.map(softmax) : transposed(transposed(logits).map(softmax));

  const weightedSums = (votes, coupling) =>
    votes[0].map((_, j) => [0, 1].map((d) => sum(votes.map((row, i) => coupling[i][j] * row[j][d]))));

  const agreements = (votes, vectors) => votes.map((row) => row.map((vote, j) => dot(vote, vectors[j])));

  const scaled = (v, factor) => v.map((x) => factor * x);

  function squash(s) {
    const n = dot(s, s);
    return scaled(s, n / (1 + n) / Math.sqrt(n + 1e-7));
  }

  // Sabour, Frosst, Hinton 2017, procedure 1: torchcaps.routing_rounds
  function dynamic(votes, { iterations, over }) {
    const rounds = [];
    let logits = everywhere(votes, () => 0);
    for (let n = 0; n < iterations; n++) {
      const coupling = compete(logits, over), sums = weightedSums(votes, coupling), capsules = sums.map(squash);
      const agreement = agreements(votes, capsules);
      rounds.push({ logits, coupling, sums, capsules, agreement, activations: capsules.map(length) });
      logits = logits.map((row, i) => row.map((b, j) => b + agreement[i][j]));
    }
    return rounds;
  }

  // Mazzia, Salvetti, Chiaberge 2021, section 3: torchcaps.self_attention_routing
  function selfAttention(votes) {
    const total = weightedSums(votes, everywhere(votes, () => 1));
    const logits = agreements(votes, total.map((s) => scaled(s, Math.SQRT1_2)));
    const coupling = compete(logits, "outputs"), sums = weightedSums(votes, coupling);
    const capsules = sums.map((s) => (length(s) ? scaled(s, -Math.expm1(-length(s)) / length(s)) : s));
    return [{ logits, coupling, sums, capsules, activations: capsules.map(length) }];
  }

  // Hinton, Sabour, Frosst 2018, procedure 1, for activations of 1 and costs of 0:
  // torchcaps.em_routing(..., final_lambda=1)
  function em(votes, { iterations }) {
    const rounds = [];
    let logits = everywhere(votes, () => 0);
    for (let n = 0; n < iterations; n++) {
      const coupling = compete(logits, "outputs"), masses = transposed(coupling).map(sum);
      const sums = weightedSums(votes, coupling), means = sums.map((s, j) => scaled(s, 1 / masses[j]));
      const squares = votes.map((row) => row.map((vote, j) => vote.map((x, d) => (x - means[j][d]) ** 2)));
      const variances = weightedSums(squares, coupling).map((s, j) => s.map((x) => x / masses[j] + 1e-9));
      const costs = variances.map((each, j) => masses[j] * sum(each.map((x) => Math.log(x) / 2)));
      const activations = costs.map((cost) => 1 / (1 + Math.exp((1 - 0.95 ** (n + 1)) * cost)));
      rounds.push({ logits, coupling, sums, capsules: means, activations, spreads: variances.map((each) => each.map(Math.sqrt)) });
      logits = squares.map((row) => row.map((square, j) => Math.log(activations[j]) - sum(square.map((x, d) =>
        (Math.log(2 * Math.PI * variances[j][d]) + x / variances[j][d]) / 2))));
    }
    return rounds;
  }

  const ROUTINGS = { dynamic, "self-attention": selfAttention, EM: em };

  // ---- examples ----

  // Inputs 0 to 2 agree about output 0, inputs 3 and 4 about output 1.
  const FIRST = [
    [[0.9, 0.5], [0.6, -0.8]], [[1, 0.3], [-0.9, -0.3]], [[0.8, 0.6], [0.2, 0.9]], [[-0.7, 0.2], [-0.6, 0.8]], [[0.1, -0.9], [-0.7, 0.7]],
  ];

  // The votes of "Three rounds by hand".
  const BY_HAND = [[[1, 0], [0, 1]], [[1, 0], [0, -1]], [[-1, 0], [0, 2]]];

  // Returns the outputs that have the largest coupling of some input after three iterations of dynamic routing.
  const favoured = (votes) =>
    new Set(dynamic(votes, { iterations: 3, over: "outputs" })[2].coupling.map((row) => row.indexOf(Math.max(...row))));

  // Returns random votes with one group of inputs for each output: the group agrees about this output only. They are
  // drawn again until every output has the largest coupling of some input.
  function agreeing(inputs, outputs) {
    const centres = [[0.9, 0.5], [-0.6, 0.8], [0.3, -0.9]];
    const scatter = (size) => size * (Math.random() + Math.random() - 1);
    const draw = () => Array.from({ length: inputs }, (_, i) => Array.from({ length: outputs }, (_, j) => {
      const own = Math.floor((i * outputs) / inputs) === j;
      return [0, 1].map((d) => (own ? centres[j][d] : 0) + scatter(own ? 0.25 : 1.5));
    }));
    let votes = draw();
    while (favoured(votes).size < outputs) votes = draw();
    return votes;
  }

  // ---- drawing ----

  const REACH = 2, PLAY = 1200; // milliseconds from one iteration to the next
  const number = (x) => (Math.abs(x) < 0.005 ? 0 : x).toFixed(2).replace("-", "−");
  const pair = (v) => `(${v.map(number).join(", ")})`;
  const mixed = (a, b, part) => (Array.isArray(a) ? a.map((x, n) => mixed(x, b[n], part)) : a + part * (b - a));

  function make(kind, attributes = {}, ...parts) {
    const made = document.createElement(kind);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...parts);
    return made;
  }

  function draw(kind, attributes, ...parts) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", kind);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...parts);
    return made;
  }

  // An arrow from the origin; the plane's second axis points up, the screen's down.
  function arrow(name, [x, y], width) {
    const size = 0.09 + width, long = Math.hypot(x, y) || 1, [u, v] = [x / long, y / long];
    const [a, b] = [x - size * u, y - size * v], side = 0.55 * size;
    const head = [[x, y], [a - side * v, b + side * u], [a + side * v, b - side * u]].map(([p, q]) => `${p},${-q}`).join(" ");
    const line = draw("line", { x1: 0, y1: 0, x2: a, y2: -b, "stroke-width": width });
    return draw("g", { class: name }, line, draw("polygon", { points: head }));
  }

  function playground(place) {
    const state = { votes: FIRST, routing: "dynamic", over: "outputs", iterations: 3, round: 0 };
    let rounds, timer = null;

    const inputs = () => state.votes.length, outputs = () => state.votes[0].length;
    const resized = (rows, columns) => {
      const fresh = agreeing(rows, columns);
      return fresh.map((row, i) => row.map((vote, j) => state.votes[i]?.[j] ?? vote));
    };

    // ---- controls ----

    const choice = (label, values, read, write) => {
      const select = make("select", {}, ...values.map((value) => make("option", { value }, String(value))));
      select.addEventListener("change", () => show(write(select.value)));
      return Object.assign(make("label", {}, `${label} `, select), { refresh: () => (select.value = read()), select });
    };
    const button = (label, action) => {
      const made = make("button", { type: "button" }, label);
      made.addEventListener("click", action);
      return made;
    };
    const choices = [
      choice("Inputs", [3, 4, 5, 6, 7, 8], inputs, (n) => ({ votes: resized(Number(n), outputs()) })),
      choice("Outputs", [2, 3], outputs, (n) => ({ votes: resized(inputs(), Number(n)) })),
      choice("Routing", Object.keys(ROUTINGS), () => state.routing, (routing) => ({ routing, round: 0 })),
      choice("Softmax over", ["outputs", "inputs"], () => (state.routing === "dynamic" ? state.over : "outputs"), (over) => ({ over })),
      choice("Iterations", [1, 2, 3, 4, 5], () => state.iterations, (n) => ({ iterations: Number(n) })),
    ];
    const back = button("Back", () => show({ round: state.round - 1 }));
    const step = button("Step", () => show({ round: (state.round + 1) % rounds.length })), playing = button("▶ Play", play);
    const examples = [
      button("By hand", () => show({ votes: BY_HAND, round: 0, routing: "dynamic", over: "outputs", iterations: 3 })),
      button("New groups", () => show({ votes: agreeing(inputs(), outputs()), round: 0 })),
    ];
    examples[1].title = "Random votes: inputs of a group agree about one output";
    const graph = draw("svg", { class: "graph", role: "img" }), planes = make("div", { class: "planes" });
    const says = make("p", { class: "says", "aria-live": "polite" }), table = make("div", { class: "numbers" });
    place.replaceChildren(
      make("div", { class: "controls" }, ...choices, ...examples),
      make("div", { class: "controls" }, back, step, playing, make("output")),
      says, make("div", { class: "stage" }, graph, planes), table,
    );

    // ---- display ----

    function show(changes = {}) {
      clearInterval(timer);
      timer = null;
      Object.assign(state, changes);
      rounds = ROUTINGS[state.routing](state.votes, state);
      state.round = Math.min(state.round, rounds.length - 1);
      choices.forEach((each) => each.refresh());
      choices[3].select.disabled = state.routing !== "dynamic";
      choices[4].select.disabled = state.routing === "self-attention";
      step.disabled = playing.disabled = rounds.length < 2;
      planes.replaceChildren(...state.votes[0].map((_, j) => plane(j)));
      render(state.round);
      explain();
    }

    // Draws iteration t, counted from 0; between two iterations, values are interpolated.
    function render(t) {
      const [low, high] = [rounds[Math.floor(t)], rounds[Math.ceil(t)]], part = t - Math.floor(t);
      const at = (name) => low[name] && mixed(low[name], high[name], part);
      const [coupling, capsules, activations, spreads] = ["coupling", "capsules", "activations", "spreads"].map(at);
      renderGraph(coupling, activations);
      [...planes.children].forEach((figure, j) => {
        const [[x, y], [rx, ry]] = [capsules[j], spreads?.[j] ?? [0, 0]];
        figure.querySelector(".moving").replaceChildren(
          draw("ellipse", { cx: x, cy: -y, rx: Math.max(rx, 0.02), ry: Math.max(ry, 0.02) }), arrow("capsule", [x, y], 0.06));
        const asides = aside(state.votes.map((row) => row[j]));
        figure.querySelectorAll(".vote").forEach((vote, i) => {
          vote.setAttribute("transform", `translate(${asides[i][0]}, ${-asides[i][1]})`);
          vote.replaceChildren(arrow(`input-${i}`, state.votes[i][j], 0.02 + 0.1 * Math.min(coupling[i][j], 1)), tip(state.votes[i][j]));
        });
        figure.querySelector("output").textContent = `${state.routing === "EM" ? "activation" : "length"} ${number(activations[j])}`;
      });
      place.querySelector(".controls output").textContent = `iteration ${Math.round(t) + 1} of ${rounds.length}`;
    }

    // Returns how far to shift each vote, so that votes of one direction are drawn side by side and none is hidden.
    function aside(votes) {
      const directions = votes.map((v) => (length(v) > 0.01 ? scaled(v, 1 / length(v)) : [1, 0]));
      return directions.map(([x, y], i) => {
        const alike = directions.flatMap((other, n) => (dot([x, y], other) > 0.998 ? [n] : []));
        const far = 0.12 * (alike.indexOf(i) - (alike.length - 1) / 2);
        return [-y * far, x * far];
      });
    }

    const tip = ([x, y]) => draw("circle", { class: "tip", cx: x, cy: -y, r: 0.16 });

    function renderGraph(coupling, activations) {
      const rows = inputs(), high = 34 * rows, y = (n, of) => ((n + 0.5) * high) / of;
      graph.setAttribute("viewBox", `0 0 200 ${high}`);
      const lines = coupling.flatMap((row, i) => row.map((c, j) =>
        draw("line", { class: `input-${i}`, x1: 26, y1: y(i, rows), x2: 142, y2: y(j, outputs()), "stroke-width": 12 * Math.min(c, 1) + 0.3 })));
      const left = coupling.map((_, i) => draw("g", { class: `input-${i}` },
        draw("circle", { cx: 16, cy: y(i, rows), r: 11 }), draw("text", { x: 16, y: y(i, rows) + 4 }, String(i))));
      const right = activations.map((a, j) => draw("g", { class: "target" },
        draw("circle", { cx: 156, cy: y(j, outputs()), r: 20, class: "full" }), draw("circle", { cx: 156, cy: y(j, outputs()), r: 20 * Math.sqrt(a) }),
        draw("text", { x: 188, y: y(j, outputs()) + 4 }, String(j))));
      graph.replaceChildren(...lines, ...left, ...right);
      graph.setAttribute("aria-label", `Couplings of ${rows} inputs with ${outputs()} outputs; the table has their numbers`);
    }

    function plane(j) {
      const svg = draw("svg", { viewBox: [-REACH, -REACH, 2 * REACH, 2 * REACH].map((x) => 1.1 * x).join(" ") },
        draw("path", { class: "axes", d: `M${-REACH},0H${REACH}M0,${-REACH}V${REACH}` }), draw("circle", { class: "axes", r: 1 }),
        ...state.votes.map((_, i) => draw("g", {
          class: "vote", tabindex: 0, role: "button", "aria-label": `Vote of input ${i} for output ${j}: drag it, or move it by the arrow keys` })),
        draw("g", { class: "moving" }));
      svg.querySelectorAll(".vote").forEach((vote, i) => {
        vote.addEventListener("pointerdown", (event) => {
          vote.setPointerCapture(event.pointerId);
          event.preventDefault();
        });
        vote.addEventListener("pointermove", (event) => {
          if (!vote.hasPointerCapture(event.pointerId)) return;
          const { left, top, width } = svg.getBoundingClientRect(), unit = (2.2 * REACH) / width;
          move(i, j, [(event.clientX - left) * unit - 1.1 * REACH, 1.1 * REACH - (event.clientY - top) * unit]);
        });
        vote.addEventListener("keydown", (event) => {
          const by = { ArrowLeft: [-0.1, 0], ArrowRight: [0.1, 0], ArrowUp: [0, 0.1], ArrowDown: [0, -0.1] }[event.key];
          if (!by) return;
          event.preventDefault();
          move(i, j, state.votes[i][j].map((x, d) => x + by[d]));
        });
      });
      return make("figure", {}, make("figcaption", {}, make("strong", {}, `Output ${j}`), " ", make("output")), svg);
    }

    function move(i, j, to) {
      const vote = to.map((x) => Math.max(-REACH, Math.min(REACH, Math.round(100 * x) / 100)));
      state.votes = state.votes.map((row, n) => (n === i ? row.map((old, m) => (m === j ? vote : old)) : row));
      rounds = ROUTINGS[state.routing](state.votes, state);
      render(state.round); // keep the elements, so that the dragged vote keeps pointer and focus
      explain();
    }

    // ---- the numbers of the iteration, and a sentence about them ----

    // Returns a sentence about the coupling that has grown most since the iteration before, and why.
    function growth() {
      if (!state.round) return "All couplings are equal.";
      const { coupling } = rounds[state.round], before = rounds[state.round - 1];
      const grown = coupling.flatMap((row, i) => row.map((c, j) => ({ i, j, by: c - before.coupling[i][j] })));
      const { i, j } = grown.reduce((most, each) => (each.by > most.by ? each : most));
      const shares = `from ${number(before.coupling[i][j])} to ${number(coupling[i][j])}`;
      const agreed = before.agreement?.[i].map((a, n) => `${number(a)} with output ${n}`).join(", ");
      const why = agreed ? `; its agreement was ${agreed}` : "";
      return `The coupling of input ${i} with output ${j} grows most, ${shares}${why}.`;
    }

    function explain() {
      const { logits, coupling, sums, capsules, agreement, activations, spreads } = rounds[state.round];
      const isLast = state.round === rounds.length - 1, perInput = state.over === "outputs" || state.routing !== "dynamic";
      const rule = perInput ? "The c of each input sum to 1." : "The inputs compete for each output: the c of each output sum to 1.";
      says.textContent = `${rule} ${rounds.length > 1 ? growth() : ""}`;
      back.disabled = !state.round;
      step.textContent = isLast ? "Start again" : "Step";
      const cells = { vote: state.votes.map((row) => row.map(pair)), b: logits, c: coupling, ...(agreement && { a: agreement }) };
      const columns = Object.keys(cells);
      const shown = (value) => (typeof value === "string" ? value : number(value));
      const row = (name, values, span = {}) => make("tr", {}, make("th", { scope: "row" }, name), ...values.map((value) => make("td", span, value)));
      const total = (name, value) => row(name, [value], { colspan: columns.length });
      table.replaceChildren(
        make("div", { class: "rounds" }, ...capsules.map((capsule, j) => make("table", { class: "round" },
          make("caption", {}, `output ${j}`),
          make("thead", {}, make("tr", {}, ...["input", ...columns].map((name) => make("th", { scope: "col" }, name)))),
          make("tbody", {}, ...state.votes.map((_, i) => row(String(i), columns.map((name) => shown(cells[name][i][j]))))),
          make("tfoot", {}, total("sum of c · vote", pair(sums[j])), total(spreads ? "mean μ" : "capsule v", pair(capsule)),
            ...(spreads ? [total("spread σ", pair(spreads[j]))] : []),
            total(spreads ? "activation" : "length", number(activations[j])))))),
        make("p", {}, spreads ? "b: logarithm of the output's activation times the density of the vote; c: coupling, the softmax of b." :
          !agreement ? "b: scalar product of a vote with the sum of all votes, over √2; c: coupling, the softmax of b." :
          `b: routing logits; c: coupling, the softmax of b; a: agreement, the scalar product of vote and capsule${isLast ? "." : ", which is added to b for the next iteration."}`));
    }

    function play() {
      const still = matchMedia("(prefers-reduced-motion: reduce)").matches, start = performance.now();
      show({ round: 0 });
      timer = setInterval(() => {
        const passed = (performance.now() - start) / PLAY, done = Math.floor(passed);
        const t = Math.min(done + (still ? 0 : Math.max(0, 2 * (passed - done) - 1)), rounds.length - 1); // hold each iteration for a while
        render(t);
        if (Math.floor(t) !== state.round) {
          state.round = Math.floor(t);
          explain();
        }
        if (t === rounds.length - 1) clearInterval(timer);
      }, 40);
    }

    show();
    place.playground = { state, show, rounds: () => rounds };
  }

  document.querySelectorAll(".playground").forEach(playground);
})();
