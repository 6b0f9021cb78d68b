// Elements. Children that are not elements become text, so a name from a file is never markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value == null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) element.style.setProperty(name, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child != null && child !== false));
  return element;
}

export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

// A table in a box that scrolls sideways; cells may be text or elements.
export function table(caption, header, rows, options = {}) {
  const head = header.map((cell) => h("th", { scope: "col" }, cell));
  const body = rows.map((cells) =>
    h("tr", null, cells.map((cell, index) =>
      index === 0 ? h("th", { scope: "row" }, cell) : h("td", null, cell))));
  const content = h("table", { class: options.class },
    h("caption", { class: options.hideCaption ? "hidden" : null }, h("span", null, caption)),
    h("thead", null, h("tr", null, head)), h("tbody", null, body));
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, content);
}

// The numbers of a chart as a table, which is made when it is opened.
export function numbers(makeTable) {
  const box = h("details", { class: "numbers" }, h("summary", null, "Numbers as a table"));
  box.addEventListener("toggle", () => {
    box.querySelector(".scroll")?.remove();
    if (box.open) box.append(makeTable());
  });
  return box;
}

export function section(id, heading, ...children) {
  return h("section", { "aria-labelledby": id }, h("h2", { id }, heading), ...children);
}

export function note(...text) {
  return h("p", { class: "soft" }, ...text);
}

// A row of buttons of which one is pressed.
export function choice(label, options, current, onchoose) {
  const buttons = options.map(([value, text]) =>
    h("button", { type: "button", "aria-pressed": String(value === current), onclick: () => onchoose(value) }, text));
  return h("div", { class: "choice", role: "group", "aria-label": label }, h("span", null, `${label}:`), buttons);
}

// The width of a picture that is not scaled down, so that its letters can be read on a phone.
export function pictureWidth() {
  return Math.max(280, Math.min(640, document.getElementById("main").clientWidth - 32));
}
