// ---- questions about the image: what the networks see, and reconstructions of capsules ----
import { ask } from "./ask.js";
import { capsuleWords, decodedClasses, ownClass, showView } from "./capsules.js";
import { $, about, colour, decodeBytes, encode, figure, latest, networks, say, state, whole } from "./core.js";
import { isMoved, paintWhole, takePose } from "./pose.js";

export const look = latest(async () => {
  const pixels = state.pixels;
  if (!pixels) return;
  const text = encode(pixels);
  const views = await Promise.all(networks.map((one, network) =>
    ask("look", { network, pixels: text, iterations: one === about ? state.iterations : 0 })));
  if (state.pixels === null) return; // cleared meanwhile
  Object.assign(state, { views, view: views[networks.indexOf(about)] });
  say("");
  takePose(pixels === state.pixels ? state.linkedPose : null);
  showView();
});

export const decode = latest(async () => {
  if (!state.view || about.noPose) return;
  const classes = decodedClasses();
  const { whole: bytes, apart } = hasPicture() ? state.view.decoded : await askPicture(classes);
  if (!state.view) return; // cleared meanwhile
  state.decoded = decodeBytes(bytes);
  paintWhole();
  whole.setAttribute("aria-label", `Reconstruction from ${capsuleWords(classes)}`);
  const parts = apart.map((one, n) => ({ j: classes[n], made: figure(one, classes[n], colour(n, classes[n])) }));
  if (about.slots) parts.sort((a, b) => a.j - b.j); // by number; the classes are those of the longest capsules first
  $(".apart").replaceChildren(...parts.map(({ made }) => made));
});

// The answer to an image has the picture of the predicted classes. Other capsules, and moved ones, are decoded on demand.
const hasPicture = () => !isMoved() && state.view.present.includes(ownClass());

function askPicture(classes) {
  const poses = classes.map((j) => (j === ownClass() ? state.pose : state.view.capsules[j]));
  return ask("decode", { network: networks.indexOf(about), classes, poses });
}
