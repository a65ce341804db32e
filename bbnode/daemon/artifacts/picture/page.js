"use strict";
(() => {
  const { details, parts, folded, drawings } = JSON.parse(document.getElementById("data").textContent);
  const get = (id) => document.getElementById(id);
  const view = get("view"), side = get("side"), names = get("names"), legend = get("legend");
  const pictures = [view.querySelector("svg")];
  const spare = get("unfolded");
  if (spare) pictures.push(spare.content.querySelector("svg"));
  let svg = null, panels = [], size = null, boxes = new Map(), edges = [], chosen = null;

  // --- scroll and zoom: the view scrolls as any page does, so only the scale is ours -----------
  const LEAST = 0.1, LEGIBLE = 0.25, MOST = 3, STEP = 1.25;
  let scale = 1, untouched = true;
  const rescale = (to) => {
    scale = to;
    svg.setAttribute("width", size.width * scale);
    svg.setAttribute("height", size.height * scale);
    get("percent").textContent = `${Math.round(scale * 100)} %`;
    name();
  };
  const middle = () => {
    const frame = view.getBoundingClientRect();
    return [frame.left + view.clientWidth / 2, frame.top + view.clientHeight / 2];
  };
  // What is under (x, y) in the window stays there.
  const zoom = (to, [x, y] = middle()) => {
    const before = svg.getBoundingClientRect();
    const [u, v] = [(x - before.left) / scale, (y - before.top) / scale];
    rescale(Math.min(MOST, Math.max(Math.min(LEAST, whole()), to)));
    const after = svg.getBoundingClientRect();
    view.scrollLeft += after.left + u * scale - x;
    view.scrollTop += after.top + v * scale - y;
    untouched = false;
  };
  const whole = () => Math.min(1, view.clientWidth / size.width, view.clientHeight / size.height);
  // 100 %, at the ops that run first.
  const open = () => {
    rescale(1);
    view.scrollTop = 0;
    const first = [...svg.querySelectorAll(".body")].map((body) => body.getBBox());
    const near = first.filter((box) => box.y + box.height < view.clientHeight);
    if (size.width <= view.clientWidth || !near.length) return;
    // No further to the right than it takes to see them, or the topmost of them.
    const left = Math.min(...near.map((box) => box.x)), right = Math.max(...near.map((box) => box.x + box.width));
    const top = near.reduce((a, b) => (b.y < a.y ? b : a));
    const all = right - left + 64 < view.clientWidth;
    view.scrollLeft = (all ? right : top.x + top.width) + 32 - view.clientWidth;
  };
  const draw = (picture, frames) => {
    svg = picture;
    panels = frames;
    view.replaceChildren(svg);
    const [, , width, height] = svg.getAttribute("viewBox").split(" ").map(Number);
    size = { width, height };
    boxes = new Map([...svg.querySelectorAll(".box")].map((box) => [box.dataset.key, box]));
    edges = [...svg.querySelectorAll(".edge")];
    rescale(scale);
  };
  // The names of the classes stay in sight where the heads of their panels do not.
  const name = () => {
    const frame = view.getBoundingClientRect(), at = svg.getBoundingClientRect();
    names.replaceChildren(...panels.flatMap((panel) => {
      const left = at.left - frame.left + panel.x * scale, top = at.top - frame.top + panel.y * scale;
      const from = Math.max(0, left), to = Math.min(view.clientWidth, left + panel.width * scale);
      if ((top + 30 * scale > 0 && left > -8) || top + panel.height * scale < 40 || to - from < 60) return [];
      const label = make("div", panel.title);
      label.style.left = `${from}px`;
      label.style.maxWidth = `${to - from}px`;
      return [label];
    }));
  };
  view.addEventListener("scroll", name);
  new ResizeObserver(() => { if (untouched) open(); else name(); }).observe(view);
  view.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) { untouched = false; return; }
    event.preventDefault();
    zoom(scale * Math.exp(-event.deltaY / 400), [event.clientX, event.clientY]);
  }, { passive: false });
  let drag = null;
  view.addEventListener("pointerdown", (event) => {
    // A finger scrolls without our help.
    if (event.button !== 0) return;
    drag = { x: event.clientX, y: event.clientY, moved: false, ours: event.pointerType === "mouse" };
  });
  view.addEventListener("pointermove", (event) => {
    if (!drag || !drag.ours) return;
    const dx = event.clientX - drag.x, dy = event.clientY - drag.y;
    if (!drag.moved && Math.abs(dx) + Math.abs(dy) < 4) return;
    if (!drag.moved) view.setPointerCapture(event.pointerId);
    Object.assign(drag, { x: event.clientX, y: event.clientY, moved: true });
    untouched = false;
    view.scrollLeft -= dx;
    view.scrollTop -= dy;
    view.classList.add("dragging");
  });
  const drop = (event) => {
    view.classList.remove("dragging");
    if (drag && !drag.moved && event.type === "pointerup") {
      const box = event.target.closest(".box");
      choose(box ? box.dataset.key : null);
    }
    drag = null;
  };
  view.addEventListener("pointerup", drop);
  view.addEventListener("pointercancel", drop);
  const reopen = () => { open(); untouched = true; };
  // A long program's width: all of it would be a thread.
  const fit = () => {
    rescale(whole() < LEGIBLE ? Math.min(1, view.clientWidth / size.width) : whole());
    view.scrollTo(0, 0);
    untouched = false;
  };
  const bare = () => { side.hidden = !side.hidden; get("help").setAttribute("aria-expanded", !side.hidden); };
  const unfold = () => {
    if (pictures.length < 2) return;
    const other = svg === pictures[0] ? 1 : 0;
    draw(pictures[other], drawings[other]);
    get("fold").setAttribute("aria-pressed", Boolean(other));
    if (untouched) open();
    choose(chosen);
    if (chosen) show(chosen);
    seek();
  };
  const act = { in: () => zoom(scale * STEP), out: () => zoom(scale / STEP), percent: reopen, fit, help: bare, fold: unfold };
  for (const [id, run] of Object.entries(act)) if (get(id)) get(id).onclick = run;
  const byKey = {
    "+": act.in, "=": act.in, "-": act.out, 0: reopen, f: fit, c: unfold, "?": bare,
    "/": () => search.focus(), Escape: () => choose(null),
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target === search) return;
    const run = byKey[event.key];
    if (!run) { untouched = false; return; }
    run();
    event.preventDefault();
  });

  // The boxes that stand for an op: a folded constant has those of its readers.
  const shownAs = (key) => (boxes.has(key) ? [key] : folded[key] ?? []);
  const show = (key) => {
    const box = boxes.get(shownAs(key)[0]);
    if (!box) return;
    const frame = view.getBoundingClientRect(), place = box.getBoundingClientRect();
    const right = frame.left + view.clientWidth, bottom = frame.top + view.clientHeight;
    if (place.left < frame.left || place.right > right || place.top < frame.top || place.bottom > bottom) {
      untouched = false;
      view.scrollLeft += place.left + place.width / 2 - (frame.left + right) / 2;
      view.scrollTop += place.top + place.height / 2 - (frame.top + bottom) / 2;
    }
  };

  // --- details ---------------------------------------------------------------------------------
  const make = (tag, content, className) => {
    const element = document.createElement(tag);
    if (content !== undefined) element.textContent = content;
    if (className) element.className = className;
    return element;
  };
  const link = (key) => {
    const known = details[key];
    const a = make("a", known ? known.name : key);
    a.href = "#";
    a.onclick = (event) => { event.preventDefault(); choose(key); show(key); };
    return a;
  };
  const values = (title, list, word) => {
    if (!list.length) return;
    side.append(make("h3", title));
    const ul = make("ul");
    for (const value of list) {
      const li = make("li");
      li.append(make("span", value.name));
      if (value.type) li.append(" ", make("span", value.type, "soft"));
      value.boxes.forEach((key, index) => {
        li.append(index ? ", " : ` ${word} `);
        li.append(link(key));
      });
      ul.append(li);
    }
    side.append(ul);
  };
  const table = (title, entries) => {
    const rows = Object.entries(entries);
    if (!rows.length) return;
    side.append(make("h3", title));
    const dl = make("dl");
    for (const [key, value] of rows) dl.append(make("dt", key), make("dd", value));
    side.append(dl);
  };
  const describe = (key) => {
    const detail = details[key];
    if (!detail) { side.replaceChildren(legend); return; }
    side.replaceChildren();
    const close = make("button", "×", "close");
    close.title = "Close (Esc)";
    close.onclick = () => choose(null);
    side.append(close, make("h2", detail.op), make("p", detail.name));
    side.append(make("p", `on ${parts[key]} · ${detail.domain}`, "soft"));
    values("Reads", detail.inputs, "from");
    values("Waits for", detail.waits, "from");
    values("Makes", detail.outputs, "read by");
    table("Attributes", detail.attributes);
    table("Metadata", detail.metadata);
    if (detail.guards.length) {
      side.append(make("h3", "Guarded by"), make("p", detail.guards.join(", ")));
    }
    if (detail.graph.length) {
      side.append(make("h3", "Runs as one graph"), make("pre", detail.graph.join("\n")));
    }
  };
  let wasHidden = null;
  const choose = (key) => {
    for (const box of boxes.values()) box.classList.remove("chosen", "near");
    for (const edge of edges) edge.classList.remove("near");
    const known = key && (details[key] || boxes.has(key)) ? key : null;
    svg.classList.toggle("focused", Boolean(known));
    // Details open beside the picture and close again, as the legend was before.
    if (known && wasHidden === null) wasHidden = side.hidden;
    if (known && details[known]) side.hidden = false;
    if (!known && wasHidden !== null) { side.hidden = wasHidden; wasHidden = null; }
    chosen = known;
    describe(known);
    for (const box of shownAs(known).map((each) => boxes.get(each))) {
      const outer = box.parentElement.closest(".box") || box;
      box.classList.add("chosen");
      outer.classList.add("near");
      for (const edge of edges) {
        const ends = [edge.dataset.from, edge.dataset.to];
        if (!ends.includes(outer.dataset.key)) continue;
        edge.classList.add("near");
        for (const end of ends) boxes.get(end).classList.add("near");
      }
    }
  };

  // --- search ----------------------------------------------------------------------------------
  const search = get("search"), found = get("found");
  let hits = [], next = 0;
  const text = (key) => JSON.stringify(details[key] ?? "");
  const seek = () => {
    const wanted = search.value.trim().toLowerCase();
    const within = new Map();
    for (const key of Object.keys(folded)) {
      if (!boxes.has(key)) for (const each of folded[key]) within.set(each, `${within.get(each) ?? ""} ${text(key)}`);
    }
    hits = [];
    next = 0;
    for (const [key, box] of boxes) {
      const words = `${box.querySelector("title")?.textContent ?? ""} ${text(key)} ${within.get(key) ?? ""}`;
      const hit = wanted !== "" && words.toLowerCase().includes(wanted);
      box.classList.toggle("hit", hit);
      if (hit) hits.push(key);
    }
    found.textContent = !wanted ? "" : hits.length ? `${hits.length} found, Enter: next` : "none found";
  };
  search.addEventListener("input", seek);
  search.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { search.value = ""; seek(); view.focus(); }
    if (event.key !== "Enter" || !hits.length) return;
    choose(hits[next % hits.length]);
    show(hits[next % hits.length]);
    next += 1;
  });

  draw(pictures[0], drawings[0]);
  // The legend beside the picture where there is room for both, behind its button elsewhere.
  side.hidden = size.width + 340 > window.innerWidth;
  get("help").setAttribute("aria-expanded", !side.hidden);
  describe(null);
  open();
  view.focus({ preventScroll: true });
})();
