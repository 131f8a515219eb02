"use strict";
// Layered layout of nested boxes. Every open box is laid out by itself: its nodes, folded boxes and open boxes
// are items in layers from top to bottom; an edge that leaves or enters the box ends at a port on its border.
// So no line runs through a node, and folding a box changes nothing inside of the others.

const GAP_X = 18, GAP_Y = 34, GAP_PORT = 12, PADDING = 12, HEADER = 24, GAP_HEADER = 4, SWEEPS = 8;

// item: {w, h, inside: Map(port -> x) for open boxes}; link: {from, to, fromPort, toPort}, ends are items.
// Sets x and y (centre and top, relative to the content) of every item, and points of every link.
function layered(items, links, ports) {
  const order = acyclicOrder(items, links);
  assignLayers(order, links, ports);
  const rows = rowsOf(order, links);
  placeRows(rows);
  const height = assignHeights(rows);
  for (const link of links) link.points = pointsOf(link);
  return {width: Math.max(0, ...rows.flat().map((it) => it.x + it.w / 2)), height};
}

// Returns the items so that links lead forward; a link that cannot is marked as reversed.
function acyclicOrder(items, links) {
  for (const item of items) Object.assign(item, {out: [], in: [], state: 0});
  for (const link of links) { link.reversed = false; link.from.out.push(link); link.to.in.push(link); }
  const done = [];
  for (const root of [...items].reverse()) {  // the result is reversed once more
    const stack = root.state ? [] : [[root, root.out.length]];
    root.state = root.state || 1;
    while (stack.length) {
      const top = stack[stack.length - 1];
      const link = top[0].out[--top[1]];
      if (!link) { top[0].state = 2; done.push(top[0]); stack.pop(); continue; }
      if (link.to.state === 1) link.reversed = true;
      if (link.to.state === 0) { link.to.state = 1; stack.push([link.to, link.to.out.length]); }
    }
  }
  return done.reverse();
}

function ends(link) { return link.reversed ? [link.to, link.from] : [link.from, link.to]; }

// Longest path from the top; what starts there, and what is made of parameters only, moves down to its reader.
function assignLayers(order, links, ports) {
  const first = ports.in.length ? 1 : 0;
  for (const item of order) { item.layer = item.isPort === "in" ? 0 : first; item.above = []; item.below = []; }
  for (const link of links) { const [a, b] = ends(link); a.below.push(b); b.above.push(a); }
  for (const item of order) for (const b of item.below) b.layer = Math.max(b.layer, item.layer + 1);
  for (const item of order) {
    item.constant = !item.isPort && item.kind !== "input" && item.above.every((a) => a.constant);
    item.late = item.constant || (!item.isPort && !item.above.length);
  }
  for (const item of [...order].reverse()) {
    if (item.late && item.below.length) item.layer = Math.min(...item.below.map((b) => b.layer)) - 1;
  }
  const last = Math.max(0, ...order.filter((it) => it.isPort !== "out").map((it) => it.layer));
  for (const item of order) if (item.isPort === "out") item.layer = last + 1;
}

// Layers as arrays; a link over several layers gets a dummy item in each layer between. Links that leave an item
// at the same place share them: one trunk with branches, not a line for each reader.
function rowsOf(order, links) {
  const rows = [];
  const put = (item) => { (rows[item.layer] = rows[item.layer] || []).push(item); };
  const trunks = new Map();
  for (const item of order) { item.up = []; item.down = []; put(item); }
  for (const link of links) {
    const [a, b] = ends(link);
    const [portA, portB] = link.reversed ? [link.toPort, link.fromPort] : [link.fromPort, link.toPort];
    const trunk = trunkOf(trunks, a, portA);
    for (let layer = a.layer + trunk.length + 1; layer < b.layer; layer++) {
      const dummy = {w: 6, h: 0, layer, up: [], down: [], isDummy: true};
      if (trunk.length) join(trunk[trunk.length - 1], null, dummy, null); else join(a, portA, dummy, null);
      trunk.push(dummy);
      put(dummy);
    }
    link.dummies = trunk.slice(0, b.layer - a.layer - 1);
    const last = link.dummies[link.dummies.length - 1];
    if (last) join(last, null, b, portB); else join(a, portA, b, portB);
  }
  return Array.from(rows, (row) => row || []);
}

function trunkOf(trunks, item, port) {
  let byPort = trunks.get(item);
  if (!byPort) trunks.set(item, byPort = new Map());
  const place = item.outPorts && item.outPorts.has(port) ? port : null;
  if (!byPort.has(place)) byPort.set(place, []);
  return byPort.get(place);
}

function join(a, portA, b, portB) {
  const weight = a.isDummy && b.isDummy ? 4 : a.isDummy || b.isDummy ? 1 : 3;
  a.down.push({other: b, own: portA, theirs: portB, weight});
  b.up.push({other: a, own: portB, theirs: portA, weight});
}

// Where a link touches an item, from its centre.
function offset(item, port, side) {
  const ports = side === "out" ? item.outPorts : item.inPorts;
  return port !== null && ports && ports.has(port) ? ports.get(port) - item.w / 2 : 0;
}

// Alternates: order each layer by where its neighbours are, and place it as close to them as fits.
function placeRows(rows) {
  for (const row of rows) spread(row, row.map((_, i) => i), row.map(() => 1));
  const upward = rows.map((_, i) => i).reverse(), downward = rows.map((_, i) => i);
  for (let sweep = 0; sweep < SWEEPS; sweep++) {
    for (const i of sweep % 2 ? upward : downward) {
      const row = rows[i], side = sweep % 2 ? "down" : "up";
      const wanted = new Map(row.map((item) => [item, wish(item, [side])]));
      row.sort((a, b) => wanted.get(a).x - wanted.get(b).x);
      spread(row, row.map((it) => wanted.get(it).x), row.map((it) => wanted.get(it).weight));
    }
  }
  for (let sweep = 0; sweep < SWEEPS; sweep++) {
    for (const i of sweep % 2 ? upward : downward) {
      const wishes = rows[i].map((item) => wish(item, ["up", "down"]));
      spread(rows[i], wishes.map((w) => w.x), wishes.map((w) => w.weight));
    }
  }
  const left = Math.min(...rows.flat().map((it) => it.x - it.w / 2));
  for (const item of rows.flat()) item.x -= left;
}

function wish(item, sides) {
  let sum = 0, weight = 0;
  for (const side of sides) {
    const [mine, theirs] = side === "up" ? ["in", "out"] : ["out", "in"];
    for (const join of item[side]) {
      sum += join.weight * (join.other.x + offset(join.other, join.theirs, theirs) - offset(item, join.own, mine));
      weight += join.weight;
    }
  }
  return weight ? {x: sum / weight, weight} : {x: item.x, weight: 0.1};
}

// Places a row in its order at the least squared distance from the wishes that keeps the gaps: after taking
// the gaps off, neighbours that want to change places share their mean (pool adjacent violators).
function spread(row, wishes, weights) {
  const blocks = [];
  let shift = 0;
  row.forEach((item, i) => {
    if (i) shift += (row[i - 1].w + item.w) / 2 + (item.isDummy && row[i - 1].isDummy ? 6 : GAP_X);
    item.shift = shift;
    let block = {sum: (wishes[i] - shift) * weights[i], weight: weights[i], items: [item]};
    while (blocks.length && blocks[blocks.length - 1].sum / blocks[blocks.length - 1].weight >= block.sum / block.weight) {
      const before = blocks.pop();
      block = {sum: before.sum + block.sum, weight: before.weight + block.weight, items: before.items.concat(block.items)};
    }
    blocks.push(block);
  });
  for (const block of blocks) for (const item of block.items) item.x = block.sum / block.weight + item.shift;
}

function isBorder(row) { return row.some((item) => item.isPort); }

function assignHeights(rows) {
  let y = 0;
  rows.forEach((row, i) => {
    const height = Math.max(0, ...row.map((item) => item.h));
    for (const item of row) Object.assign(item, {y, rowTop: y, rowBottom: y + height});
    if (i === rows.length - 1) y += height;
    else y += height + (isBorder(row) ? GAP_PORT : isBorder(rows[i + 1]) ? 0 : GAP_Y);
  });
  return y;
}

// Corners of a link's line from its source to its target: straight inside rows, curved between them.
function pointsOf(link) {
  const [a, b] = ends(link);
  const [portA, portB] = link.reversed ? [link.toPort, link.fromPort] : [link.fromPort, link.toPort];
  const xa = a.x + offset(a, portA, "out"), xb = b.x + offset(b, portB, "in");
  const points = [[xa, a.y + a.h], [xa, a.rowBottom]];
  for (const dummy of link.dummies) points.push([dummy.x, dummy.rowTop], [dummy.x, dummy.rowBottom]);
  points.push([xb, b.rowTop]);
  return link.reversed ? points.reverse() : points;
}

// The visible tree. box: {open, nodes: [leaf], boxes: [box], parent}; leaf: node or folded box, {w, h, parent}.
// Lays out ``root`` and everything inside; returns the drawn lines with absolute coordinates.
function layoutTree(root, edges) {
  const levels = new Map();
  const level = (box) => {
    if (!levels.has(box)) levels.set(box, {links: new Map(), in: new Map(), out: new Map()});
    return levels.get(box);
  };
  for (const edge of edges) addEdge(edge, level);
  layoutBox(root, level);
  const lines = [];
  place(root, 0, 0, level, lines);
  return lines;
}

function ancestors(leaf) {
  const chain = [];
  for (let box = leaf.parent; box; box = box.parent) chain.push(box);
  return chain;
}

// Splits an edge where it crosses borders: up from its source to the common box, across, down to its target.
function addEdge(edge, level) {
  const up = ancestors(edge.source), down = ancestors(edge.target);
  const common = up.find((box) => down.includes(box));
  const port = edge.source;
  let from = edge.source;
  for (const box of up.slice(0, up.indexOf(common))) {
    addLink(level(box), from, portItem(level(box).out, port, "out"), edge, port);
    from = box;
  }
  let to = edge.target;
  for (const box of down.slice(0, down.indexOf(common))) {
    addLink(level(box), portItem(level(box).in, port, "in"), to, edge, port);
    to = box;
  }
  addLink(level(common), from, to, edge, port);
}

function portItem(ports, port, side) {
  if (!ports.has(port)) ports.set(port, {w: 0, h: 0, isPort: side, port});
  return ports.get(port);
}

function addLink(at, from, to, edge, port) {
  let byTarget = at.links.get(from);
  if (!byTarget) at.links.set(from, byTarget = new Map());
  let byPort = byTarget.get(to);
  if (!byPort) byTarget.set(to, byPort = new Map());
  let link = byPort.get(port);
  if (!link) byPort.set(port, link = {from, to, fromPort: port, toPort: port, edges: []});
  link.edges.push(edge);
}

function layoutBox(box, level) {
  for (const inner of box.boxes) if (inner.open) layoutBox(inner, level);
  const at = level(box);
  at.list = [...at.links.values()].flatMap((byTarget) => [...byTarget.values()].flatMap((m) => [...m.values()]));
  const ports = {in: [...at.in.values()], out: [...at.out.values()]};
  const {width, height} = layered([...ports.in, ...box.items, ...ports.out], at.list, ports);
  const header = box.parent ? HEADER : 0;
  box.w = Math.max(width, box.headerWidth || 0) + 2 * PADDING;
  box.h = height + header + PADDING;
  let left = (box.w - width) / 2;
  const taken = ports.in.map((item) => left + item.x).sort((a, b) => a - b);
  const short = header ? placeHeader(box, taken) : 0;
  left += short;
  box.w += short;
  box.origin = [left, header];
  box.inPorts = new Map(ports.in.map((item) => [item.port, left + item.x]));
  box.outPorts = new Map(ports.out.map((item) => [item.port, left + item.x]));
}

// Puts the header where no line enters through it: left of all, else in the first gap that is wide enough. Returns
// by how much the content must move to the right where there is no such gap.
function placeHeader(box, taken) {
  const needed = box.headerWidth + 2 * GAP_HEADER, borders = [0, ...taken, box.w];
  const gap = borders.findIndex((x, i) => i < borders.length - 1 && borders[i + 1] - x >= needed);
  box.headerX = (gap > 0 ? borders[gap] : 0) + GAP_HEADER;
  return gap < 0 ? needed - taken[0] : 0;
}

// Turns relative into absolute coordinates: ax, ay is an item's top left corner.
function place(box, x, y, level, lines) {
  box.ax = x; box.ay = y;
  const [left, top] = [x + box.origin[0], y + box.origin[1]];
  for (const item of box.items) {
    item.ax = left + item.x - item.w / 2; item.ay = top + item.y;
    if (item.open) place(item, item.ax, item.ay, level, lines);
  }
  for (const link of level(box).list) {
    const points = link.points.map(([px, py]) => [left + px, top + py]);
    // The rows of ports are the borders themselves.
    if (link.from.isPort) points[0][1] = y;
    if (link.to.isPort) points.push([points[points.length - 1][0], y + box.h]);
    lines.push({points, edges: link.edges, arrow: !link.to.isPort && !link.to.open, target: link.to});
  }
}
