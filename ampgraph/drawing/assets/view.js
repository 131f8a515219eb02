"use strict";
// The page: draws what layout.js places, and answers to mouse, keys and search. Text only ever enters the page
// through textContent, so no name or reason can become markup.

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const canvas = byId("canvas"), scene = byId("scene");
const SVG = "http://www.w3.org/2000/svg";
const LINE = 15, READABLE = .6;  // height of a line of text; the smallest scale at which it can be read
const measure = document.createElement("canvas").getContext("2d");

function make(parent, tag, attributes = {}, text = null) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== null) element.textContent = text;
  return parent.appendChild(element);
}

function html(parent, tag, text = null, className = "") {
  const element = document.createElement(tag);
  if (text !== null) element.textContent = text;
  if (className) element.className = className;
  return parent.appendChild(element);
}

function widthOf(lines) {
  return Math.max(...lines.map((line, i) => {
    measure.font = i ? "11px system-ui, sans-serif" : "600 12px system-ui, sans-serif";
    return measure.measureText(line).width;
  }));
}

// -- the model: leaves with their sizes, boxes with their parents ---------------------------------------------

const nodes = data.nodes.map((node, index) => {
  const slanted = node.kind === "cast" ? 28 : 0;
  return {...node, index, w: Math.ceil(widthOf(node.lines)) + 18 + slanted, h: node.lines.length * LINE + 8};
});
const boxes = [];

function makeBox(raw, parent) {
  const box = {...raw, parent, nodes: raw.nodes.map((i) => nodes[i])};
  boxes.push(box);
  for (const node of box.nodes) node.parent = box;
  box.boxes = raw.boxes.map((inner) => makeBox(inner, box));
  const lines = [box.label, ...box.counts];
  box.small = {w: Math.ceil(widthOf(lines)) + 44, h: lines.length * LINE + 12};
  box.headerWidth = Math.ceil(widthOf([box.label])) + 30;
  return box;
}

const root = makeBox(data.root, null);
root.open = true;
const edges = data.edges.map(([source, target, type, widened, saved]) =>
  ({source: nodes[source], target: nodes[target], type, widened, saved}));
for (const node of nodes) { node.reads = []; node.readBy = []; }
for (const edge of edges) { edge.source.readBy.push(edge); edge.target.reads.push(edge); }
const highlighted = data.highlighted && new Set(data.highlighted.map((i) => nodes[i]));

// -- drawing ---------------------------------------------------------------------------------------------------

let picked = null, matches = [], matchAt = -1, drawn = new Map(), lines = [];
const view = {x: 0, y: 0, scale: 1};

function visible(leaf) {  // the leaf itself, or the outermost folded box around it
  let result = leaf;
  for (let box = leaf.parent; box; box = box.parent) if (!box.open) result = box;
  return result;
}

function layout() {
  const prepare = (box) => {
    for (const inner of box.boxes) {
      if (inner.open) prepare(inner); else Object.assign(inner, inner.small);
    }
    box.items = [...box.nodes, ...box.boxes];
  };
  prepare(root);
  const merged = new Map();
  for (const edge of edges) {
    const source = visible(edge.source), target = visible(edge.target);
    if (source === target || edge.saved) continue;
    if (!merged.has(source)) merged.set(source, new Map());
    const arcs = merged.get(source);
    if (!arcs.has(target)) arcs.set(target, {source, target, edges: [], widened: false});
    const arc = arcs.get(target);
    arc.edges.push(edge);
    arc.widened = arc.widened || edge.widened;
  }
  return layoutTree(root, [...merged.values()].flatMap((arcs) => [...arcs.values()]));
}

function draw() {
  lines = layout();
  scene.replaceChildren();
  drawn = new Map();
  const frames = make(scene, "g"), paths = make(scene, "g"), leaves = make(scene, "g"), headers = make(scene, "g");
  drawFrames(root, frames, headers, leaves);
  spreadEntries(lines);
  for (const line of lines) drawLine(line, paths);
  mark();
}

function drawFrames(box, frames, headers, leaves) {
  for (const node of box.nodes) drawNode(node, leaves);
  for (const inner of box.boxes) {
    if (!inner.open) { drawFolded(inner, leaves); continue; }
    const group = make(frames, "g", {class: `box ${inner.kind}`, "data-key": inner.key});
    make(group, "rect", {class: "frame", x: inner.ax, y: inner.ay, width: inner.w, height: inner.h, rx: 8});
    drawn.set(inner, group);
    drawHeader(inner, headers);
    drawFrames(inner, frames, headers, leaves);
  }
}

function drawHeader(box, parent) {
  const header = make(parent, "g", {class: "header"});
  const x = box.ax + box.headerX;
  make(header, "rect", {class: "plate", x, y: box.ay + 3, width: box.headerWidth, height: 18, rx: 4});
  toggle(header, box, x + 2, box.ay + 5, "\u2212");
  const label = make(header, "text", {class: "first", x: x + 21, y: box.ay + 16}, box.label);
  make(label, "title", {}, box.key);
  header.addEventListener("click", () => pick(box));
}

function toggle(parent, box, x, y, sign) {
  const group = make(parent, "g", {class: "toggle", "data-toggle": box.key, role: "button"});
  make(group, "rect", {x, y, width: 14, height: 14, rx: 3});
  make(group, "text", {x: x + 7, y: y + 11, "text-anchor": "middle"}, sign);
  make(group, "title", {}, box.open ? "fold" : "unfold");
  group.addEventListener("click", (event) => { event.stopPropagation(); setOpen(box, !box.open); });
}

function drawFolded(box, parent) {
  const group = make(parent, "g", {class: "folded", "data-key": box.key});
  const x = box.ax, y = box.ay, share = box.ops ? box.low / box.ops : 0;
  const plain = box.fill ? box.fill : !box.ops || box.kind === "plumbing" ? data.colours.other : share ? data.colours.low : data.colours.fp32;
  make(group, "rect", {class: "shape", x, y, width: box.w, height: box.h, fill: plain});
  if (!box.fill && share > 0 && share < 1) {
    make(group, "rect", {x: x + box.w * share, y, width: box.w * (1 - share), height: box.h, fill: data.colours.fp32});
    make(group, "rect", {class: "shape", x, y, width: box.w, height: box.h, fill: "none"});
  }
  make(group, "rect", {class: "inner", x: x + 3, y: y + 3, width: box.w - 6, height: box.h - 6, fill: "none", stroke: "#666", "stroke-width": .7});
  drawText(group, [box.label, ...box.counts], x + box.w / 2 + 8, y + 6, box.ink);
  make(group, "title", {}, `${box.key}\n${box.counts.join("\n")}`);
  toggle(group, box, x + 7, y + 7, "+");
  group.addEventListener("click", () => pick(box));
  group.addEventListener("dblclick", () => setOpen(box, true));
  drawn.set(box, group);
}

function drawNode(node, parent) {
  const group = make(parent, "g", {class: `node ${node.kind}${node.neighbour ? " neighbour" : ""}`, "data-name": node.name});
  drawShape(group, node, node.ax, node.ay, node.w, node.h);
  drawText(group, node.lines, node.ax + node.w / 2, node.ay + 4, node.ink);
  make(group, "title", {}, node.tooltip);
  group.addEventListener("click", () => pick(node));
  drawn.set(node, group);
}

function drawShape(parent, node, x, y, w, h) {
  const fill = node.fill ? node.fill : node.neighbour || node.plain ? "#fff" : node.boundary ? data.colours.boundary
    : node.kind === "cast" || node.kind === "clamp" ? data.colours.cast : data.colours[node.precision];
  const attributes = {class: "shape", fill};
  const points = {
    cast: node.precision === "low" ? [[0, 0], [w, 0], [w - 14, h], [14, h]] : [[14, 0], [w - 14, 0], [w, h], [0, h]],
    parameter: [[0, 0], [w - 8, 0], [w, 8], [w, h], [0, h]],
  }[node.kind];
  if (points) return make(parent, "polygon", {...attributes, points: points.map(([a, b]) => `${x + a},${y + b}`).join(" ")});
  const round = ["input", "output", "graph"].includes(node.kind) ? h / 2 : node.kind === "clamp" ? 0 : 6;
  return make(parent, "rect", {...attributes, x, y, width: w, height: h, rx: round});
}

function drawText(parent, textLines, x, y, ink) {
  textLines.forEach((line, i) => {
    const text = make(parent, "text", {class: i ? "small" : "first", x, y: y + LINE * i + 11, "text-anchor": "middle"}, line);
    if (ink) text.style.fill = ink;
  });
}

// Lines that end at one leaf get places of their own along its upper edge, in the order they come from.
function spreadEntries(all) {
  const byTarget = new Map();
  for (const line of all) {
    if (!line.arrow) continue;
    if (!byTarget.has(line.target)) byTarget.set(line.target, []);
    byTarget.get(line.target).push(line);
  }
  for (const [target, coming] of byTarget) {
    const from = (line) => line.points[line.points.length - 2][0];
    coming.sort((a, b) => from(a) - from(b));
    const room = target.w * (target.kind === "cast" && target.precision !== "low" ? .4 : .7);
    coming.forEach((line, i) => {
      const x = target.ax + target.w / 2 + room * ((i + .5) / coming.length - .5);
      const last = line.points[line.points.length - 1];
      last[0] = x;
      if (last[1] !== target.ay) line.points.push([x, target.ay]);
    });
  }
}

function drawLine(line, parent) {
  let path = `M${line.points[0]}`;
  for (let i = 1; i < line.points.length; i++) {
    const [[x0, y0], [x1, y1]] = [line.points[i - 1], line.points[i]];
    const middle = (y0 + y1) / 2;
    path += x0 === x1 ? `L${x1},${y1}` : `C${x0},${middle} ${x1},${middle} ${x1},${y1}`;
  }
  const widened = line.edges.some((arc) => arc.widened);
  line.element = make(parent, "path", {class: `line${widened ? " widened" : ""}`, d: path});
  if (line.arrow) line.element.setAttribute("marker-end", "url(#arrow)");
  const types = new Set(line.edges.flatMap((arc) => arc.edges.map((edge) => edge.type)));
  make(line.element, "title", {}, [...types].join("\n") + (widened ? "\nwidened inside the kernel" : ""));
}

// -- state -> classes ------------------------------------------------------------------------------------------

function inside(box) { return [...box.nodes, ...box.boxes.flatMap(inside)]; }

function mark() {
  const found = new Set(matches.map(visible));
  const bright = highlighted && new Set([...highlighted].map(visible));
  for (const [thing, group] of drawn) {
    const leaf = !thing.open;
    group.classList.toggle("found", leaf && found.has(thing));
    group.classList.toggle("highlighted", leaf && bright !== null && bright.has(thing));
    group.classList.toggle("faded", leaf && bright !== null && !bright.has(thing));
    group.classList.toggle("picked", thing === picked);
  }
  for (const line of lines) {
    line.element.classList.toggle("picked", line.edges.some((arc) => arc.source === picked || arc.target === picked));
  }
}

function setOpen(box, open) {
  const before = [box.ax * view.scale + view.x, box.ay * view.scale + view.y];
  box.open = open;
  draw();
  if (visible(box) === box || box.open) {  // keep it where it was on the screen
    view.x = before[0] - box.ax * view.scale;
    view.y = before[1] - box.ay * view.scale;
  }
  show();
}

function setAll(open) {
  for (const box of boxes) if (box !== root) box.open = open;
  draw();
  fit(READABLE);
}

function unfoldLevel() {
  const closed = boxes.filter((box) => !box.open && visible(box) === box);
  for (const box of closed) box.open = true;
  draw();
  fit(READABLE);
}

// -- details ---------------------------------------------------------------------------------------------------

function pick(thing) {
  picked = thing;
  const panel = byId("details");
  panel.hidden = false;
  panel.replaceChildren();
  html(panel, "h2", thing.name || thing.key || "model");
  if (thing.reason) html(panel, "p", `${thing.by}: ${thing.reason}`, "reason");
  const list = html(panel, "dl");
  for (const [key, value] of thing.facts) { html(list, "dt", key); html(list, "dd", value); }
  if (thing.reads) {
    neighbourList(panel, "reads", thing.reads, (edge) => edge.source);
    neighbourList(panel, "read by", thing.readBy, (edge) => edge.target);
  } else {
    const button = html(panel, "button", thing.open ? "fold" : "unfold");
    button.addEventListener("click", () => { setOpen(thing, !thing.open); pick(thing); });
  }
  mark();
}

function neighbourList(panel, heading, list, other) {
  if (!list.length) return;
  html(panel, "h3", heading);
  for (const edge of list) {
    const note = (edge.widened ? ", widened inside the kernel" : "") + (edge.saved ? ", saved for the backward" : "");
    const button = html(panel, "button", `${other(edge).lines[0]}  ${edge.type}${note}`);
    button.addEventListener("click", () => reveal(other(edge)));
  }
}

function reveal(node) {
  let changed = false;
  for (let box = node.parent; box; box = box.parent) { changed = changed || !box.open; box.open = true; }
  if (changed) draw();
  pick(node);
  view.scale = Math.max(view.scale, READABLE);
  const area = canvas.getBoundingClientRect();
  view.x = area.width / 2 - (node.ax + node.w / 2) * view.scale;
  view.y = area.height / 2 - (node.ay + node.h / 2) * view.scale;
  show();
}

// -- search ----------------------------------------------------------------------------------------------------

function search() {
  const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  matches = words.length ? nodes.filter((node) => words.every((word) => node.text.includes(word))) : [];
  const named = (node) => words.some((word) => node.name.toLowerCase().includes(word) || node.lines[0].toLowerCase().includes(word));
  matches = [...matches.filter(named), ...matches.filter((node) => !named(node))];
  matchAt = -1;
  byId("found").textContent = words.length ? `${matches.length} found` : "";
  mark();
}

function nextMatch(step) {
  if (!matches.length) return;
  matchAt = (matchAt + step + matches.length) % matches.length;
  byId("found").textContent = `${matchAt + 1} of ${matches.length}`;
  reveal(matches[matchAt]);
}

// -- pan and zoom ----------------------------------------------------------------------------------------------

function show() { scene.setAttribute("transform", `translate(${view.x} ${view.y}) scale(${view.scale})`); }

function fit(smallest = 0) {
  const area = canvas.getBoundingClientRect();
  view.scale = Math.max(smallest, Math.min(1.2, .96 * area.width / root.w, .96 * area.height / root.h));
  view.x = (area.width - root.w * view.scale) / 2;
  view.y = Math.max(8, (area.height - root.h * view.scale) / 2);
  show();
}

function zoom(factor, x, y) {
  const scale = Math.min(4, Math.max(.02, view.scale * factor));
  view.x = x - (x - view.x) * scale / view.scale;
  view.y = y - (y - view.y) * scale / view.scale;
  view.scale = scale;
  show();
}

function zoomCentre(factor) {
  const area = canvas.getBoundingClientRect();
  zoom(factor, area.width / 2, area.height / 2);
}

canvas.addEventListener("wheel", (event) => {
  event.preventDefault();
  const area = canvas.getBoundingClientRect();
  zoom(Math.exp(-event.deltaY * .0015), event.clientX - area.left, event.clientY - area.top);
}, {passive: false});

let drag = null, dragged = false;
canvas.addEventListener("pointerdown", (event) => {
  drag = {x: event.clientX - view.x, y: event.clientY - view.y};
  dragged = false;
});
window.addEventListener("pointermove", (event) => {
  if (!drag) return;
  dragged = dragged || Math.hypot(event.clientX - drag.x - view.x, event.clientY - drag.y - view.y) > 3;
  canvas.classList.add("dragging");
  view.x = event.clientX - drag.x;
  view.y = event.clientY - drag.y;
  show();
});
// Letting go after a drag is no click on what lies there.
canvas.addEventListener("click", (event) => { if (dragged) event.stopPropagation(); }, {capture: true});
window.addEventListener("pointerup", () => { drag = null; canvas.classList.remove("dragging"); });

// -- start -----------------------------------------------------------------------------------------------------

function legend() {
  const entries = byId("entries");
  for (const entry of data.legend) {
    const row = html(entries, "div");
    const swatch = make(row, "svg", {width: 44, height: 22});
    if (entry.outline === "folded") {
      make(swatch, "rect", {x: 3, y: 3, width: 24, height: 16, fill: data.colours.low});
      make(swatch, "rect", {x: 27, y: 3, width: 14, height: 16, fill: data.colours.fp32});
      make(swatch, "rect", {class: "shape", x: 3, y: 3, width: 38, height: 16, fill: "none"});
    } else if (entry.outline === "plumbing") {
      make(swatch, "rect", {class: "shape", x: 3, y: 3, width: 38, height: 16, fill: data.colours.other});
      make(swatch, "rect", {x: 5, y: 5, width: 34, height: 12, fill: "none", stroke: "#666", "stroke-width": .7});
    } else if (entry.line) make(swatch, "path", {class: `line ${entry.line}`, d: "M2,11L42,11"});
    else if (entry.outline) make(make(swatch, "g", {class: entry.outline}), "rect", {class: entry.outline === "guard" ? "frame" : "shape", x: 3, y: 3, width: 38, height: 16, fill: "#fff"});
    else drawShape(make(swatch, "g", {class: `node ${entry.kind}${entry.neighbour ? " neighbour" : ""}`}), entry, 2, 3, 40, 16);
    html(row, "span", entry.words);
  }
}

// A click goes to the cast; of equal ones in several layers, each click to the next.
function largest() {
  byId("largest").hidden = !data.largest.length;
  data.largest.forEach((entry, i) => {
    let at = -1;
    const button = html(byId("casts"), "button");
    html(button, "b", `#${i + 1}  ${entry.size}`);
    html(button, "span", entry.words);
    button.addEventListener("click", () => {
      at = (at + 1) % entry.nodes.length;
      reveal(nodes[entry.nodes[at]]);
    });
  });
}

byId("title").textContent = data.title;
byId("fold").addEventListener("click", () => setAll(false));
byId("unfold").addEventListener("click", () => setAll(true));
byId("level").addEventListener("click", unfoldLevel);
byId("in").addEventListener("click", () => zoomCentre(1.3));
byId("out").addEventListener("click", () => zoomCentre(1 / 1.3));
byId("fit").addEventListener("click", () => fit());
byId("search").addEventListener("input", search);
byId("search").addEventListener("keydown", (event) => { if (event.key === "Enter") nextMatch(event.shiftKey ? -1 : 1); });
document.addEventListener("keydown", (event) => {
  if (event.target.tagName === "INPUT") return;
  if (event.key === "/") { event.preventDefault(); byId("search").focus(); }
  if (event.key === "f") fit();
});
const arrow = make(make(canvas, "defs"), "marker", {id: "arrow", viewBox: "0 0 8 8", refX: 8, refY: 4, markerWidth: 7, markerHeight: 7, markerUnits: "userSpaceOnUse", orient: "auto"});
make(arrow, "path", {d: "M0,0L8,4L0,8z", fill: "#555"});
legend();
largest();
draw();
fit(READABLE);
document.body.dataset.ready = "true";
