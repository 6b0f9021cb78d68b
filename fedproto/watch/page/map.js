// Prototypes as a map: the global ones large, the clients' small; a slider walks over the rounds.

import { classColour, percent, plain } from "./format.js";
import { h, note, numbers, pictureWidth, section, svg, table } from "./dom.js";

const MAP_HEIGHT = 420;
const EDGE = 26;
const MAX_LOCAL = 1500;

export class PrototypeMap {
  #step = null; // null: the latest
  #drawn = "";

  constructor() {
    this.slider = h("input", { type: "range", min: "0", step: "1", "aria-label": "Round of the prototypes", oninput: () => { this.#step = Number(this.slider.value); this.#draw(); } });
    this.text = h("output");
    this.picture = h("div");
    this.note = note("");
    this.element = section("map", "Prototypes", h("div", { class: "controls" }, this.slider, this.text), h("figure", null, this.picture), numbers(() => this.#table()), this.note);
  }

  update(run) {
    this.run = run;
    this.element.hidden = !run.map;
    if (!run.map) return;
    const key = JSON.stringify([run.id, run.map.steps.length, run.map.steps.at(-1)]);
    if (key === this.#drawn) return;
    this.#drawn = key;
    this.#draw();
  }

  #draw() {
    const { map } = this.run;
    const last = map.steps.length - 1;
    if (this.#step != null && this.#step >= last) this.#step = null;
    const at = this.#step ?? last;
    this.slider.max = String(last);
    this.slider.value = String(at);
    this.slider.parentElement.hidden = last === 0;
    const step = map.steps[at];
    this.text.textContent = `after round ${step.round}`;
    const local = at === last ? map.local.slice(0, MAX_LOCAL) : [];
    this.picture.replaceChildren(this.#paint(map, step, at, local));
    const share = map.share.reduce((sum, value) => sum + value, 0);
    this.note.textContent = `Each letter or number is the global prototype of a class; small dots are the latest prototypes of single clients. The axes are the two principal components of the global prototypes and hold ${percent(share)} of their variance.` +
      (this.run.state === "running" ? " While a run goes on, prototypes come from its checkpoints, and the lines show those that this page has seen." : "");
  }

  #paint(map, step, at, local) {
    const width = pictureWidth();
    const all = [...map.steps.flatMap((each) => each.points.map((point) => point.slice(1))), ...local.map((point) => point.slice(2))];
    const xs = all.map((point) => point[0]);
    const ys = all.map((point) => point[1]);
    const scale = (low, high, size) => (value) => EDGE + ((value - low) / (high - low || 1)) * (size - 2 * EDGE);
    const x = scale(Math.min(...xs), Math.max(...xs), width);
    const y = scale(Math.max(...ys), Math.min(...ys), MAP_HEIGHT);
    const dots = local.map(([client, label, left, top]) => svg("circle", { cx: x(left).toFixed(1), cy: y(top).toFixed(1), r: 2.5, fill: classColour(label), class: "local" },
      svg("title", null, `client ${this.run.clients[client]?.name ?? client}, ${map.names[label]}`)));
    const trails = [];
    for (const [label] of at > 0 ? step.points : []) {
      const path = map.steps.slice(0, at + 1).map((each) => each.points.find((point) => point[0] === label)).filter(Boolean);
      trails.push(svg("polyline", { points: path.map((point) => `${x(point[1]).toFixed(1)},${y(point[2]).toFixed(1)}`).join(" "), stroke: classColour(label), class: "trail" }));
    }
    const marks = step.points.map(([label, left, top]) => svg("g", null,
      svg("circle", { cx: x(left).toFixed(1), cy: y(top).toFixed(1), r: 8, fill: classColour(label), class: "global" }, svg("title", null, map.names[label])),
      svg("text", { x: (x(left) + 11).toFixed(1), y: (y(top) + 4).toFixed(1) }, shorten(map.names[label]))));
    return svg("svg", { viewBox: `0 0 ${width} ${MAP_HEIGHT}`, class: "map", role: "img", "aria-label": `Map of ${step.points.length} global prototypes after round ${step.round}` }, dots, trails, marks);
  }

  #table() {
    const { map } = this.run;
    const rows = map.steps.at(-1).points.map(([label, left, top]) => [map.names[label], plain(left), plain(top)]);
    return table("Places of the global prototypes", ["class", "first component", "second component"], rows);
  }
}

function shorten(name) {
  return name.length > 18 ? `${name.slice(0, 17)}…` : name;
}
