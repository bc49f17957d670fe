// A capsule layer that learns, in numbers only: scenes, the layer, its loss, its gradient by hand, training and the
// measurement over random seeds. learning.js draws it; tests compare it with torchcaps. It needs no other script.
//
// Axes, in this order in flat arrays: I = 5 parts, J = 2 wholes, D = 2 components of a vote, K = 4 components of a pose.

export const PARTS = 5, WHOLES = ["pentagon", "star"];
const I = PARTS, J = WHOLES.length, D = 2, K = 4, EPS = 1e-7;
const VOTES = I * J * D; // numbers of all votes of a scene
// Position of number n of the votes (I, J, D) among numbers (I, J), (J, D) and (I), and of number n of (J, D) among (J).
const positions = (length, at) => Int32Array.from({ length }, (_, n) => Math.floor(at(n)));
const PAIR = positions(VOTES, (n) => n / D), OUTPUT = positions(VOTES, (n) => n % (J * D));
const PART = positions(VOTES, (n) => n / (J * D)), WHOLE = positions(J * D, (n) => n / D);
export const BATCH = 32, TEST_SCENES = 500, START = 0.3; // START: standard deviation of the first weights

// ---- random numbers ----

// Returns a generator of numbers in [0, 1) for a seed: mulberry32 of Tommy Ettinger, in the public domain.
export function generator(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

const normal = (random) => Math.sqrt(-2 * Math.log(1 - random())) * Math.cos(2 * Math.PI * random());

// ---- scenes ----

// Draws a scene: the label of its whole, the poses (I, K) of its parts, and which parts are distractors.
//
// Part i sits at the angle 2πi/5 of a pentagon and at 4πi/5 of a star, so the wholes have the same parts in another
// order. The whole is turned by any angle and shifted. A distractor is the part of another, unseen whole. Therefore a
// single part says nothing about label or distractors; only the relations between parts do. The pose of a part is
// (x, y, cos θ, sin θ). Noise is the standard deviation of x, of y and of θ (radians).
export function drawScene(random, { noise, distractors }) {
  const label = Math.floor(J * random()), order = Array.from({ length: I }, (_, i) => i);
  for (let i = I - 1; i > 0; i--) {
    const other = Math.floor((i + 1) * random());
    [order[i], order[other]] = [order[other], order[i]];
  }
  const isDistractor = order.map((place) => place < distractors), poses = new Float64Array(I * K);
  const place = () => [2 * Math.PI * random(), 0.6 * random() - 0.3, 0.6 * random() - 0.3]; // turn, shift
  const whole = place();
  for (let i = 0; i < I; i++) {
    const [turn, x, y] = isDistractor[i] ? place() : whole, at = turn + (2 * Math.PI * i * (label + 1)) / I;
    const angle = at + noise * normal(random);
    const pose = [x + Math.cos(at) + noise * normal(random), y + Math.sin(at) + noise * normal(random), Math.cos(angle), Math.sin(angle)];
    poses.set(pose, i * K);
  }
  return { label, poses, isDistractor };
}

export const drawScenes = (random, count, dials) => Array.from({ length: count }, () => drawScene(random, dials));

// ---- the layer ----

// Returns the first weights (I, J, D, K): normal random numbers.
export const firstWeights = (random) => Float64Array.from({ length: I * J * D * K }, () => START * normal(random));

// Returns the votes (I, J, D): matrix times pose.
function castVotes(weights, poses) {
  const votes = new Float64Array(VOTES);
  for (let n = 0; n < VOTES; n++) for (let k = 0; k < K; k++) votes[n] += weights[n * K + k] * poses[PART[n] * K + k];
  return votes;
}

// Squash: shrinks s to a length below 1. factor(n) is n / (1 + n) / √(n + ε) of the squared length n.
const factor = (n) => n / (1 + n) / Math.sqrt(n + EPS);
const slope = (n) => (1 / (1 + n) ** 2 - n / (1 + n) / 2 / (n + EPS)) / Math.sqrt(n + EPS); // derivative of factor

// Softmax over the wholes of logits (I, J).
function compete(logits) {
  const coupling = logits.map(Math.exp); // agreements are small here: no power overflows
  for (let i = 0; i < I; i++) {
    let total = 0;
    for (let j = 0; j < J; j++) total += coupling[i * J + j];
    for (let j = 0; j < J; j++) coupling[i * J + j] /= total;
  }
  return coupling;
}

// Routes a scene: dynamic routing of Sabour, Frosst and Hinton (2017). With one iteration the coupling is uniform.
export function forward(weights, poses, iterations) {
  const votes = castVotes(weights, poses), rounds = [];
  let logits = new Float64Array(I * J);
  for (let t = 0; t < iterations; t++) {
    const coupling = compete(logits), sums = new Float64Array(J * D), capsules = new Float64Array(J * D);
    for (let n = 0; n < VOTES; n++) sums[OUTPUT[n]] += coupling[PAIR[n]] * votes[n];
    for (let n = 0; n < J * D; n++) capsules[n] = factor(square(sums, WHOLE[n])) * sums[n];
    rounds.push({ coupling, sums, capsules });
    logits = logits.slice();
    for (let n = 0; n < VOTES; n++) logits[PAIR[n]] += votes[n] * capsules[OUTPUT[n]];
  }
  const { capsules, coupling } = rounds.at(-1), lengths = WHOLES.map((_, j) => Math.sqrt(square(capsules, j) + EPS));
  return { votes, rounds, capsules, coupling, lengths };
}

// Returns the scalar product of the vectors of whole j in two arrays (J, D), and the squared length of one.
const dot = (some, others, j) => some[j * D] * others[j * D] + some[j * D + 1] * others[j * D + 1];
const square = (vectors, j) => dot(vectors, vectors, j);

// Margin loss of the paper: the right whole should be longer than 0.9, the other shorter than 0.1.
export const lossOf = (lengths, label) => lengths.reduce((sum, length, j) => sum + shortfall(length, j === label), 0);
const shortfall = (length, isRight) => (isRight ? Math.max(0, 0.9 - length) ** 2 : Math.max(0, length - 0.1) ** 2 / 2);
const lossSlope = (length, isRight) => (isRight ? -2 * Math.max(0, 0.9 - length) : Math.max(0, length - 0.1));

// Adds a scene's gradient of the loss to `gradient` (I, J, D, K), times `scale`, and returns the loss. The gradient goes
// back through every iteration; ofVotes is the derivative with respect to the votes, and so on.
function addGradient(gradient, weights, { poses, label }, iterations, scale) {
  const { votes, rounds, capsules, lengths } = forward(weights, poses, iterations);
  const ofVotes = new Float64Array(VOTES), ofLogits = new Float64Array(I * J);
  let ofCapsules = capsules.map((v, n) => (lossSlope(lengths[WHOLE[n]], WHOLE[n] === label) * v) / lengths[WHOLE[n]]);
  for (let t = iterations - 1; t >= 0; t--) {
    const { coupling, sums } = rounds[t], ofCoupling = new Float64Array(I * J);
    const ofSums = sums.map((s, n) => { // through squash
      const j = WHOLE[n], long = square(sums, j);
      return factor(long) * ofCapsules[n] + 2 * slope(long) * dot(sums, ofCapsules, j) * s;
    });
    for (let n = 0; n < VOTES; n++) { // through the weighted sum
      ofVotes[n] += coupling[PAIR[n]] * ofSums[OUTPUT[n]];
      ofCoupling[PAIR[n]] += votes[n] * ofSums[OUTPUT[n]];
    }
    for (let i = 0; i < I; i++) { // through softmax
      let mean = 0;
      for (let j = 0; j < J; j++) mean += coupling[i * J + j] * ofCoupling[i * J + j];
      for (let j = 0; j < J; j++) ofLogits[i * J + j] += coupling[i * J + j] * (ofCoupling[i * J + j] - mean);
    }
    if (t === 0) break; // the first logits are zero, whatever the weights are
    ofCapsules = new Float64Array(J * D);
    for (let n = 0; n < VOTES; n++) { // through the agreement, which the previous iteration added to the logits
      ofCapsules[OUTPUT[n]] += ofLogits[PAIR[n]] * votes[n];
      ofVotes[n] += ofLogits[PAIR[n]] * rounds[t - 1].capsules[OUTPUT[n]];
    }
  }
  for (let n = 0; n < VOTES; n++) // through matrix times pose
    for (let k = 0; k < K; k++) gradient[n * K + k] += scale * ofVotes[n] * poses[PART[n] * K + k];
  return lossOf(lengths, label);
}

// Returns the mean loss of scenes and its gradient.
export function lossAndGradient(weights, scenes, iterations) {
  const gradient = new Float64Array(weights.length);
  const loss = scenes.reduce((sum, scene) => sum + addGradient(gradient, weights, scene, iterations, 1 / scenes.length), 0);
  return { loss: loss / scenes.length, gradient };
}

// One step of gradient descent, in place. Returns the loss before the step.
export function step(weights, scenes, iterations, rate) {
  const { loss, gradient } = lossAndGradient(weights, scenes, iterations);
  gradient.forEach((g, n) => (weights[n] -= rate * g));
  return loss;
}

// Returns what the layer does with scenes: the share of right answers (the longer capsule wins), the mean loss, the
// mean length of the winner, and the mean coupling of parts with the right whole, apart for distractors (NaN without).
export function evaluate(weights, scenes, iterations) {
  let right = 0, loss = 0, winner = 0;
  const coupled = [0, 0], counted = [0, 0];
  for (const { poses, label, isDistractor } of scenes) {
    const { lengths, coupling } = forward(weights, poses, iterations), longest = Math.max(...lengths);
    right += lengths[label] === longest;
    loss += lossOf(lengths, label);
    winner += longest;
    isDistractor.forEach((is, i) => {
      coupled[Number(is)] += coupling[i * J + label];
      counted[Number(is)] += 1;
    });
  }
  const [own, distractor] = coupled.map((sum, n) => sum / counted[n]);
  return { accuracy: right / scenes.length, loss: loss / scenes.length, winner: winner / scenes.length, own, distractor };
}

// ---- training ----

// Returns a race of layers from the same weights, over the same scenes: one for each number of iterations.
export function race(seed, iterations, dials) {
  const random = generator(seed), weights = firstWeights(random);
  const test = drawScenes(generator(seed + 1e6), TEST_SCENES, dials), layers = iterations.map((each) => ({ iterations: each, weights: weights.slice() }));
  return {
    layers, test, steps: 0,
    advance(rate) {
      const scenes = drawScenes(random, BATCH, dials);
      this.steps += 1;
      return layers.map((layer) => step(layer.weights, scenes, layer.iterations, rate));
    },
    results: () => layers.map((layer) => evaluate(layer.weights, test, layer.iterations)),
  };
}

// Trains with random seeds first, first + 1, …; returns the results (seeds, layers) after `steps` steps.
export function measure({ first = 0, seeds, steps, iterations, rate, ...dials }) {
  return Array.from({ length: seeds }, (_, n) => {
    const run = race(first + n, iterations, dials);
    for (let step = 0; step < steps; step++) run.advance(rate);
    return run.results();
  });
}

// Mean and standard deviation (of a sample) of numbers.
export function meanAndDeviation(numbers) {
  const mean = numbers.reduce((a, b) => a + b, 0) / numbers.length;
  return [mean, Math.sqrt(numbers.reduce((sum, x) => sum + (x - mean) ** 2, 0) / (numbers.length - 1))];
}
