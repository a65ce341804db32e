"use strict";
(() => {
  const { details, parts } = JSON.parse(document.getElementById("data").textContent);
  const view = document.getElementById("view");
  const side = document.getElementById("side");
  const svg = view.querySelector("svg");
  const legend = document.getElementById("legend");
  const size = { width: +svg.getAttribute("width"), height: +svg.getAttribute("height") };
  const boxes = new Map();
  for (const box of svg.querySelectorAll(".box")) boxes.set(box.dataset.key, box);
  const edges = [...svg.querySelectorAll(".edge")];

  // --- pan and zoom ------------------------------------------------------------------------
  const at = { x: 0, y: 0, scale: 1 };
  const LEAST = 0.05, MOST = 4;
  const apply = () => {
    svg.style.transform = `translate(${at.x}px, ${at.y}px) scale(${at.scale})`;
  };
  const zoom = (factor, x = view.clientWidth / 2, y = view.clientHeight / 2) => {
    const scale = Math.min(MOST, Math.max(Math.min(LEAST, at.scale), at.scale * factor));
    at.x = x - ((x - at.x) * scale) / at.scale;
    at.y = y - ((y - at.y) * scale) / at.scale;
    at.scale = scale;
    fitted = false;
    apply();
  };
  // All of it, until somebody moves it or zooms.
  let fitted = true;
  const fit = () => {
    at.scale = Math.min(1, view.clientWidth / size.width, view.clientHeight / size.height);
    at.x = Math.max(0, (view.clientWidth - size.width * at.scale) / 2);
    at.y = 0;
    fitted = true;
    apply();
  };
  new ResizeObserver(() => { if (fitted) fit(); }).observe(view);
  view.addEventListener("wheel", (event) => {
    event.preventDefault();
    const frame = view.getBoundingClientRect();
    if (event.ctrlKey || event.metaKey || !event.shiftKey) {
      zoom(Math.exp(-event.deltaY / 500), event.clientX - frame.left, event.clientY - frame.top);
    } else {
      at.x -= event.deltaY;
      fitted = false;
      apply();
    }
  }, { passive: false });
  let drag = null;
  view.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    drag = { x: event.clientX, y: event.clientY, moved: false };
  });
  view.addEventListener("pointermove", (event) => {
    if (!drag) return;
    const dx = event.clientX - drag.x, dy = event.clientY - drag.y;
    if (!drag.moved && Math.abs(dx) + Math.abs(dy) < 4) return;
    if (!drag.moved) view.setPointerCapture(event.pointerId);
    drag.moved = true;
    drag.x = event.clientX;
    drag.y = event.clientY;
    at.x += dx;
    at.y += dy;
    fitted = false;
    view.classList.add("dragging");
    apply();
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
  view.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [60, 0], ArrowRight: [-60, 0], ArrowUp: [0, 60], ArrowDown: [0, -60] }[event.key];
    if (step) { at.x += step[0]; at.y += step[1]; fitted = false; apply(); }
    else if (event.key === "+") zoom(1.25);
    else if (event.key === "-") zoom(0.8);
    else if (event.key === "0") fit();
    else if (event.key === "Escape") choose(null);
    else return;
    event.preventDefault();
  });
  document.getElementById("in").onclick = () => zoom(1.25);
  document.getElementById("out").onclick = () => zoom(0.8);
  document.getElementById("fit").onclick = () => fit();

  const show = (key) => {
    const box = boxes.get(key);
    if (!box) return;
    const frame = view.getBoundingClientRect(), place = box.getBoundingClientRect();
    if (place.left < frame.left || place.right > frame.right || place.top < frame.top || place.bottom > frame.bottom) {
      at.x += frame.left + frame.width / 2 - (place.left + place.width / 2);
      at.y += frame.top + frame.height / 2 - (place.top + place.height / 2);
      fitted = false;
      apply();
    }
  };

  // --- details -----------------------------------------------------------------------------
  const make = (name, content, className) => {
    const element = document.createElement(name);
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
    for (const [name, value] of rows) dl.append(make("dt", name), make("dd", value));
    side.append(dl);
  };
  const describe = (key) => {
    side.replaceChildren();
    const detail = details[key];
    if (!detail) {
      side.append(make("h2", "What each class of peer runs"));
      side.append(make("p", "Click an op to see its values, settings and metadata. Drag to move, scroll to zoom."));
      side.append(legend);
      return;
    }
    side.append(make("h2", detail.op));
    side.append(make("p", detail.name));
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
  const choose = (key) => {
    for (const box of boxes.values()) box.classList.remove("chosen", "near");
    for (const edge of edges) edge.classList.remove("near");
    svg.classList.toggle("focused", Boolean(key));
    describe(key);
    const box = boxes.get(key);
    if (!box) return;
    const outer = box.parentElement.closest(".box") || box;
    box.classList.add("chosen");
    outer.classList.add("near");
    for (const edge of edges) {
      const ends = [edge.dataset.from, edge.dataset.to];
      if (!ends.includes(outer.dataset.key)) continue;
      edge.classList.add("near");
      for (const end of ends) boxes.get(end).classList.add("near");
    }
  };

  // --- search ------------------------------------------------------------------------------
  const search = document.getElementById("search"), found = document.getElementById("found");
  let hits = [], next = 0;
  const haystack = new Map();
  for (const [key, box] of boxes) {
    haystack.set(key, `${box.querySelector("title")?.textContent ?? ""} ${JSON.stringify(details[key] ?? "")}`.toLowerCase());
  }
  search.addEventListener("input", () => {
    const wanted = search.value.trim().toLowerCase();
    hits = [];
    next = 0;
    for (const [key, box] of boxes) {
      const hit = wanted !== "" && haystack.get(key).includes(wanted);
      box.classList.toggle("hit", hit);
      if (hit) hits.push(key);
    }
    found.textContent = wanted ? `${hits.length} found` : "";
  });
  search.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !hits.length) return;
    show(hits[next % hits.length]);
    choose(hits[next % hits.length]);
    next += 1;
  });

  describe(null);
  fit();
})();
