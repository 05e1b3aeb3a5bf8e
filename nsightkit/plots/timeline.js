// <nsightkit-timeline>: a timeline that zooms and pans, from data packed by nsightkit/plots/packing.py.
//
// No library, no request. Text of a trace reaches the page through textContent and fillText only. The element keeps
// a sentence as its child: it shows without scripts, before the data is unpacked, and when anything fails.
(() => {
  "use strict";
  const TAG = "nsightkit-timeline";
  if (customElements.get(TAG)) return; // a page may bring this program once a figure
  const LEAST_NS = 20; // closer than this there is nothing to see
  const GREYS = ["#5f6772", "#6b747e"]; // in turn: neighbouring ranges must not read as one

  async function unpack(text) {
    const packed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    return JSON.parse(await new Response(stream).text());
  }

  // Turns a packed lane into columns with the times of each item.
  function unfold({ gap, length, name, busy, number }) {
    const start = new Float64Array(gap.length);
    const end = new Float64Array(gap.length);
    const reach = new Float64Array(gap.length); // events may overlap: their ends need not ascend, the latest end does
    let before = 0;
    let latest = -Infinity;
    for (let i = 0; i < gap.length; i++) {
      start[i] = before + gap[i];
      before = end[i] = start[i] + length[i];
      reach[i] = latest = Math.max(latest, before);
    }
    return { start, end, reach, busy, number, name };
  }

  // First index whose value is above `x` in an ascending array.
  function above(array, x) {
    let low = 0;
    let high = array.length;
    while (low < high) {
      const middle = (low + high) >>> 1;
      if (array[middle] > x) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  const UNITS = [[1e9, "s", 9], [1e6, "ms", 6], [1e3, "µs", 3], [1, "ns", 0]];
  const unitOf = (ns) => UNITS.find(([scale]) => Math.abs(ns) >= scale) || UNITS[3];

  function duration(ns) {
    const [scale, unit] = unitOf(ns);
    return `${scale === 1 ? ns : (ns / scale).toPrecision(4)} ${unit}`;
  }

  // A point in time to the nanosecond, in groups of three digits.
  function moment(ns) {
    const [scale, unit, digits] = unitOf(ns);
    return `${(ns / scale).toFixed(digits).replace(/(\.\d{3}|\d{3})(?=\d{3})/g, "$1\u202f")} ${unit}`;
  }

  // What fits in a box: a kernel's own name, without return type, namespaces and arguments.
  function brief(name) {
    const plain = name.replace(/\(anonymous namespace\)::|<unnamed>::/g, "");
    const own = plain.split(/[<(]/, 1)[0].trim().split(/\s+/).pop().split("::").pop();
    return own || plain;
  }

  // As much of the beginning of a text as fits.
  function fitted(pen, text, room) {
    let letters = Math.min(text.length, Math.floor(room / 3));
    while (letters > 0) {
      const short = letters < text.length ? `${text.slice(0, letters)}…` : text;
      const width = pen.measureText(short).width;
      if (width <= room) return short;
      letters = Math.min(letters - 1, Math.floor((letters * room) / width));
    }
    return "";
  }

  // The beginning and the end of a label: the end says what kind of events they are.
  const ends = (text) => (text.length < 34 ? text : `${text.slice(0, 16)}…${text.slice(-16)}`);

  // A colour, as a pixel, and black or white letters for it, whose contrast is at least 4.5:1.
  function colourOf(hex) {
    const rgb = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
    const [r, g, b] = rgb.map((v) => (v <= 10 ? v / 3294.6 : ((v / 255 + 0.055) / 1.055) ** 2.4));
    const pixel = new Uint32Array(new Uint8ClampedArray([...rgb, 255]).buffer)[0];
    return { hex, pixel, letters: 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.18 ? "#000" : "#fff" };
  }

  function part(tag, properties = {}, ...children) {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  }

  const STYLE = `
    :host { display: block; margin: 1rem 0; color: inherit; font-size: 0.9rem; line-height: 1.4; --left: 14rem;
      --soft: color-mix(in srgb, currentColor 6%, transparent); --line: color-mix(in srgb, currentColor 55%, transparent); }
    * { box-sizing: border-box; }
    .bar { display: flex; flex-wrap: wrap; align-items: center; gap: 0.5rem; margin-bottom: 0.5rem; }
    .bar strong { margin-right: auto; font-size: 1rem; overflow-wrap: anywhere; }
    button { font: inherit; color: inherit; min-height: 2rem; min-width: 2rem; padding: 0 0.7rem; cursor: pointer;
      background: var(--soft); border: 1px solid var(--line); border-radius: 0.4rem; }
    :is(button, .rows, summary):focus-visible { outline: 2px solid #2f7fc1; outline-offset: 2px; }
    .stage { position: relative; touch-action: pan-y; cursor: grab; overflow: clip; }
    .strip { height: 1.6rem; margin-left: var(--left); position: relative; background: var(--soft); overflow: hidden;
      touch-action: none; }
    .strip i { position: absolute; inset-block: 0; border: 2px solid #2f7fc1; min-width: 4px;
      box-shadow: 0 0 0 200rem rgb(128 128 128 / 0.45); }
    .axis { height: 1.5rem; }
    .ticks { position: absolute; top: 1.6rem; bottom: 0; left: var(--left); right: 0; overflow: clip; pointer-events: none; z-index: 1; }
    .ticks span { position: absolute; top: 0; bottom: 0; border-left: 1px solid color-mix(in srgb, currentColor 20%, transparent); }
    .ticks b { position: sticky; top: 3.2rem; padding: 0 0.25rem; font-weight: 400; font-size: 0.75rem; white-space: nowrap;
      background: Canvas; color: CanvasText; } /* they stay in view while the reader scrolls through the rows */
    .row { display: flex; align-items: center; margin-bottom: 2px; }
    .row span { flex: none; width: var(--left); padding: 0 0.5rem 0 0.2rem; font-size: 0.75rem; overflow: hidden;
      white-space: nowrap; text-overflow: ellipsis; unicode-bidi: isolate; }
    .rows:focus .chosen span { font-weight: 700; }
    canvas { display: block; flex: 1; min-width: 0; width: 100%; height: 1.4rem; background: var(--soft); }
    .gpu canvas { height: 1.8rem; margin-bottom: 3px; }
    .name { font-weight: 600; display: block; overflow: hidden; white-space: nowrap; text-overflow: ellipsis; unicode-bidi: isolate; }
    .detail { position: sticky; bottom: 0; min-height: 3.5em; margin: 0.4rem 0 0; padding: 0.35rem 0.7rem; color: #fff;
      background: #24292f; border: 1px solid #6f7882; border-radius: 0.3rem; overflow-wrap: anywhere; }
    .legend { display: flex; flex-wrap: wrap; gap: 0.1rem 0.9rem; list-style: none; margin: 0.4rem 0 0; padding: 0; }
    .legend i { display: inline-block; width: 0.8rem; height: 0.8rem; border-radius: 0.15rem; margin-right: 0.35rem; }
    .note, details { margin: 0.4rem 0 0; font-size: 0.85rem; }
    summary { cursor: pointer; min-height: 1.5rem; width: max-content; max-width: 100%; }
    .trace { margin: 0.6rem 0 0.2rem; font-weight: 600; overflow-wrap: anywhere; }
    @media (max-width: 40rem) { :host { --left: 0rem; } .row { display: block; } .row span { display: block; width: 100%; } }`;

  const HELP = ["← → move, + − zoom, Home shows everything", "↑ ↓ choose a row, N and P its next and previous event, Enter zooms to it",
    "drag moves; double-click zooms; the wheel zooms after a click on a row, and with Ctrl or ⌘ at any time",
    "touch: drag moves, two fingers zoom, a tap reads an event", "strip on top: press where to look"];
  const HINT = "Point at, tap or choose an event to read about it.";

  class Timeline extends HTMLElement {
    connectedCallback() {
      if (this.started) return;
      this.started = true;
      // Written by the parser, the element is here before its children are.
      if (document.readyState === "loading") addEventListener("DOMContentLoaded", () => this.begin(), { once: true });
      else this.begin();
    }

    async begin() {
      try {
        const source = this.querySelector('script[type="text/plain"]');
        const data = await unpack(source.textContent.trim());
        source.remove(); // megabytes that nothing needs any more
        this.build(data);
        this.draw(); // now, so that a failure falls back to the sentence
      } catch (error) {
        // A slot shows the element's child again: the sentence.
        if (this.shadowRoot) this.shadowRoot.replaceChildren(document.createElement("slot"));
        console.warn(`${TAG} shows a sentence only:`, error);
      }
    }

    build(data) {
      this.traces = data.traces;
      this.merged = data.merged;
      this.names = data.names;
      this.kinds = data.kinds.map(([text, hex]) => ({ text, ...colourOf(hex) }));
      this.greys = GREYS.map(colourOf);
      this.span = Math.max(...data.traces.map((trace) => trace.span));
      this.origin = data.traces.length === 1 ? data.traces[0].first : 0;
      this.view = { start: 0, end: this.span };
      this.picked = null;
      this.fingers = new Map();

      const button = (text, label, action) => part("button", { type: "button", ariaLabel: label, title: label, onclick: action }, text);
      const bar = part("div", { className: "bar" }, part("strong", {}, data.title), button("−", "Zoom out", () => this.zoom(2)),
        button("+", "Zoom in", () => this.zoom(0.5)), button("All", "All: show everything", () => this.show(0, this.span)));
      this.board = part("div", { className: "rows", tabIndex: 0, role: "group", ariaLabel: this.querySelector("p").textContent });
      this.rows = [];
      for (const trace of data.traces) {
        if (data.traces.length > 1) this.board.append(part("p", { className: "trace" }, trace.label));
        for (const row of trace.rows) this.addRow(trace, { ...row, lanes: row.lanes.map((lane) => data.lanes[lane]) });
      }
      if (!this.rows.length) this.board.append("no events to draw");
      this.row = this.rows[0];
      this.frame = part("i");
      this.overview = part("canvas", { ariaHidden: "true" });
      this.strip = part("div", { className: "strip" }, this.overview, this.frame);
      this.ticks = part("div", { className: "ticks", ariaHidden: "true" });
      this.stage = part("div", { className: "stage" }, this.strip, part("div", { className: "axis" }), this.ticks, this.board);
      this.detail = part("p", { className: "detail", ariaLive: "polite" }, HINT);
      this.note = part("p", { className: "note" });
      const legend = this.kinds.slice(1).map(({ text, hex }) => {
        const patch = part("i");
        patch.style.background = hex;
        return part("li", {}, patch, text.slice(0, 60));
      });
      const help = part("details", {}, part("summary", {}, "Keys and gestures"), part("ul", {}, ...HELP.map((text) => part("li", {}, text))));
      const sheet = new CSSStyleSheet(); // allowed where a page's policy forbids inline styles
      sheet.replaceSync(STYLE);
      const root = this.attachShadow({ mode: "open" });
      root.adoptedStyleSheets = [sheet];
      root.append(bar, this.stage, this.detail, part("ul", { className: "legend", ariaLabel: "Colours" }, ...legend), this.note, help);
      this.listen();
    }

    addRow(trace, { label, gpu, lanes }) {
      const canvas = part("canvas");
      const element = part("div", { className: gpu ? "row gpu" : "row" }, part("span", { title: label }, ends(label)), canvas);
      const above = this.rows.at(-1); // a nested level has no label of its own
      this.rows.push({ trace, label: label || above.label, gpu, lanes: lanes.map(unfold), element, canvas });
      this.board.append(element);
    }

    // Show a window of time, within what there is.
    show(start, end) {
      const length = Math.min(Math.max(end - start, LEAST_NS), Math.max(this.span, LEAST_NS));
      const first = Math.min(Math.max((start + end - length) / 2, 0), Math.max(this.span - length, 0));
      this.view = { start: first, end: first + length };
      this.redraw();
    }

    // What lies under the pointer stays there, as long as it can.
    zoom(factor, at = (this.view.start + this.view.end) / 2) {
      const { start, end } = this.view;
      const scale = Math.min(factor, this.span / (end - start));
      this.show(at - (at - start) * scale, at + (end - at) * scale);
    }

    centre(t) {
      const half = (this.view.end - this.view.start) / 2;
      this.show(t - half, t + half);
    }

    pan(share) {
      this.centre((this.view.start + this.view.end) / 2 + share * (this.view.end - this.view.start));
    }

    // For the page around it: show a moment of a trace.
    reveal(number, start, end) {
      const { first } = this.traces[number];
      this.zoomTo({ start: start - first, end: end - first });
      this.scrollIntoView({ block: "start" });
      this.board.focus({ preventScroll: true });
    }

    zoomTo({ start, end }) {
      const margin = Math.max((end - start) * 0.6, LEAST_NS);
      this.show(start - margin, end + margin);
    }

    redraw() {
      this.waiting ||= requestAnimationFrame(() => {
        this.waiting = 0;
        this.draw();
      });
    }

    draw(isWhole = false) {
      const { start, end } = this.view;
      for (const row of this.rows) {
        // What is scrolled out of sight is not worth drawing, but on paper.
        const { top, bottom } = row.canvas.getBoundingClientRect();
        if (isWhole || (bottom > -100 && top < innerHeight + 100)) this.paint(row.canvas, row, this.view);
        row.element.classList.toggle("chosen", row === this.row);
      }
      if (this.overview.width !== this.strip.clientWidth) {
        const lanes = this.rows.filter((row) => row.gpu).flatMap((row) => row.lanes);
        this.paint(this.overview, { lanes }, { start: 0, end: this.span }, 1);
      }
      this.frame.style.left = `${(100 * start) / this.span}%`;
      this.frame.style.width = `${(100 * (end - start)) / this.span}%`;
      this.drawTicks();
      const notes = [`Shown: ${duration(end - start)} of ${duration(this.span)}, from ${moment(start + this.origin)}.`];
      for (const { label, leftOut } of this.traces) if (leftOut) notes.push(`Not drawn${label ? ` of ${label}` : ""}: ${leftOut}.`);
      if (this.merged) notes.push(`Neighbouring events shorter than ${duration(this.merged)} are drawn as one, with their number.`);
      this.note.textContent = notes.join(" ");
    }

    drawTicks() {
      const [from, to] = [this.view.start + this.origin, this.view.end + this.origin];
      const [scale, unit] = unitOf(to);
      const rough = ((to - from) * 110) / Math.max(this.ticks.clientWidth, 110);
      const power = 10 ** Math.floor(Math.log10(rough));
      const step = Math.max([1, 2, 5, 10].find((k) => k * power >= rough) * power, 1);
      const digits = Math.min(Math.max(Math.ceil(Math.log10(scale / step) - 1e-9), 0), 9);
      const ticks = [];
      for (let k = Math.ceil(from / step); k * step < to; k++) {
        const tick = part("span", {}, part("b", {}, `${((k * step) / scale).toFixed(digits)} ${unit}`));
        tick.style.left = `${(100 * (k * step - from)) / (to - from)}%`;
        ticks.push(tick);
      }
      this.ticks.replaceChildren(...ticks);
    }

    // Draw the items of a row: wide ones as boxes with their names; of the others, the share of each pixel column.
    paint(canvas, { lanes, gpu }, view, ratio = Math.min(devicePixelRatio || 1, 2)) {
      const columns = (canvas.width = Math.max(Math.round(canvas.clientWidth * ratio), 1));
      const height = (canvas.height = Math.max(Math.round(canvas.clientHeight * ratio), 1));
      const perPixel = (view.end - view.start) / columns;
      const bins = new Map(); // of each kind, the share of each column
      const boxes = [];
      for (const { start, end, reach, busy, number, name } of lanes) {
        const last = above(start, view.end);
        for (let i = above(reach, view.start); i < last; i++) {
          const kind = this.names[name[i]][1];
          const isBox = end[i] - start[i] >= 3 * perPixel && number[i] === 1;
          if (isBox) boxes.push([start[i], end[i], kind ? this.kinds[kind] : this.greys[i % 2], this.names[name[i]][0]]);
          else {
            if (!bins.has(kind)) bins.set(kind, new Float64Array(columns));
            spread(bins.get(kind), (start[i] - view.start) / perPixel, (end[i] - view.start) / perPixel, busy[i] / perPixel);
          }
        }
      }
      const pen = canvas.getContext("2d");
      if (bins.size) this.paintBins(pen, bins, columns, height);
      pen.font = `${11 * ratio}px ${getComputedStyle(this).fontFamily}`;
      pen.textBaseline = "middle";
      for (const [start, end, colour, name] of boxes) {
        const from = Math.max((start - view.start) / perPixel, -4);
        const to = Math.min((end - view.start) / perPixel, columns + 4);
        pen.fillStyle = colour.hex;
        pen.fillRect(from, 0, Math.max(to - from - ratio / 2, 1), height); // a hairline between neighbours
        if (to - from < 26 * ratio) continue;
        const left = Math.max(from, 0);
        pen.fillStyle = colour.letters;
        pen.fillText(fitted(pen, gpu ? brief(name) : name, Math.min(to, columns) - left - 8 * ratio), left + 4 * ratio, height / 2);
      }
    }

    // Columns whose height is the share of time covered, by kind. As pixels: thousands of rectangles take far longer.
    paintBins(pen, bins, columns, height) {
      const picture = pen.createImageData(columns, height);
      const pixels = new Uint32Array(picture.data.buffer);
      const kinds = [...bins.keys()].sort((a, b) => a - b);
      for (let x = 0; x < columns; x++) {
        let sum = 0;
        for (const kind of kinds) sum += bins.get(kind)[x];
        if (!(sum > 0)) continue;
        // Never less than two pixels: two microseconds in ten seconds must not vanish.
        const scale = Math.max(Math.min(sum, 1) * height, 2) / sum;
        let top = height;
        let y = height;
        for (const kind of kinds) {
          top -= bins.get(kind)[x] * scale;
          const { pixel } = kind ? this.kinds[kind] : this.greys[0];
          for (const stop = Math.max(Math.round(top), 0); y > stop; ) pixels[--y * columns + x] = pixel;
        }
      }
      pen.putImageData(picture, 0, 0);
    }

    item(row, { start, end, busy, number, name }, i) {
      return { row, start: start[i], end: end[i], busy: busy[i], number: number[i], name: name[i] };
    }

    // The event nearest to a time, at most three pixels away: narrower than a fingertip, wider than a 1 µs kernel.
    nearest(row, t) {
      const slack = (3 * (this.view.end - this.view.start)) / row.canvas.clientWidth;
      let best = null;
      let away = slack;
      for (const lane of row.lanes) {
        const last = above(lane.start, t + slack);
        for (let i = above(lane.reach, t - slack); i < last; i++) {
          const far = Math.max(lane.start[i] - t, t - lane.end[i], 0);
          if (far > away) continue;
          away = far;
          best = this.item(row, lane, i);
        }
      }
      return best;
    }

    // The next event of the chosen row, or the previous one; without an event, from the edge of the window.
    step(forwards) {
      let best = null;
      for (const lane of this.row ? this.row.lanes : []) {
        const from = this.picked ? this.picked.start : forwards ? this.view.start - 0.5 : this.view.end;
        const i = forwards ? above(lane.start, from) : above(lane.start, from - 0.5) - 1;
        if (i < 0 || i >= lane.start.length) continue;
        if (!best || (forwards ? lane.start[i] < best.start : lane.start[i] > best.start)) best = this.item(this.row, lane, i);
      }
      if (!best) return;
      this.pick(best);
      if (best.start < this.view.start || best.start > this.view.end) this.centre(best.start);
    }

    pick(item) {
      this.picked = item;
      if (item) this.row = item.row;
      this.describe(item);
      this.redraw();
    }

    choose(by) {
      const row = this.rows[this.rows.indexOf(this.row) + by];
      if (!row) return;
      this.row = row;
      this.picked = null;
      this.detail.replaceChildren(`Row: ${row.label}. N goes to its next event.`);
      row.element.scrollIntoView({ block: "nearest" });
      this.redraw();
    }

    describe(item) {
      if (!item) return this.detail.replaceChildren(HINT);
      const { row, start, end, busy, number } = item;
      const [name, kind] = this.names[item.name];
      let length = duration(end - start);
      if (number > 1) length = `${number.toLocaleString("en")} events, together ${duration(busy)} in ${length}; the longest is named`;
      const words = [kind ? this.kinds[kind].text : "", length, `starts at ${moment(start + row.trace.first)}`, row.label];
      this.detail.replaceChildren(part("span", { className: "name", dir: "auto", title: name }, name), words.filter(Boolean).join(" · "));
    }

    timeAt(x) {
      const { left, width } = this.ticks.getBoundingClientRect();
      return this.view.start + ((x - left) / width) * (this.view.end - this.view.start);
    }

    // The event under a pointer.
    under(event) {
      const target = this.shadowRoot.elementFromPoint(event.clientX, event.clientY);
      const row = this.rows.find(({ canvas }) => canvas === target);
      return row ? this.nearest(row, this.timeAt(event.clientX)) : null;
    }

    listen() {
      const { board, strip } = this;
      new ResizeObserver(() => this.redraw()).observe(board);
      addEventListener("scroll", () => this.redraw(), { passive: true, capture: true });
      addEventListener("beforeprint", () => this.draw(true));

      const look = (event) => {
        const { left, width } = strip.getBoundingClientRect();
        this.centre(((event.clientX - left) / width) * this.span);
      };
      strip.addEventListener("pointerdown", (event) => {
        strip.setPointerCapture(event.pointerId);
        look(event);
      });
      strip.addEventListener("pointermove", (event) => event.buttons && look(event));

      board.addEventListener("pointerdown", (event) => {
        if (event.button) return;
        board.setPointerCapture(event.pointerId);
        this.fingers.set(event.pointerId, { x: event.clientX, from: event.clientX, t: this.timeAt(event.clientX), moved: false });
      });
      board.addEventListener("pointermove", (event) => {
        const finger = this.fingers.get(event.pointerId);
        if (!finger) return this.describe(this.under(event) || this.picked);
        finger.x = event.clientX;
        if (Math.abs(finger.x - finger.from) > 4) finger.moved = true;
        if (finger.moved) this.follow([...this.fingers.values()]);
      });
      const release = (event) => {
        const finger = this.fingers.get(event.pointerId);
        this.fingers.delete(event.pointerId);
        for (const other of this.fingers.values()) other.t = this.timeAt(other.x); // it goes on from where it is
        if (finger && !finger.moved && event.type === "pointerup") this.pick(this.under(event));
      };
      board.addEventListener("pointerup", release);
      board.addEventListener("pointercancel", release);
      board.addEventListener("dblclick", (event) => {
        const item = this.under(event);
        if (item) this.zoomTo(item);
        else this.zoom(0.25, this.timeAt(event.clientX));
      });
      board.addEventListener("wheel", (event) => this.wheel(event), { passive: false });

      const keys = {
        ArrowLeft: () => this.pan(-0.2), ArrowRight: () => this.pan(0.2), ArrowUp: () => this.choose(-1), ArrowDown: () => this.choose(1),
        "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), Home: () => this.show(0, this.span),
        n: () => this.step(true), p: () => this.step(false), Enter: () => this.picked && this.zoomTo(this.picked), Escape: () => this.pick(null),
      };
      board.addEventListener("keydown", (event) => {
        const action = keys[event.key] || keys[event.key.toLowerCase()];
        if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
        event.preventDefault();
        action();
      });
    }

    // The times that fingers were put on stay under them.
    follow([a, b]) {
      if (!b) return this.centre((this.view.start + this.view.end) / 2 + a.t - this.timeAt(a.x));
      a.moved = b.moved = true;
      if (Math.abs(b.x - a.x) < 8 || a.t === b.t) return;
      const { left, width } = this.ticks.getBoundingClientRect();
      const perPixel = Math.abs((b.t - a.t) / (b.x - a.x));
      const start = a.t - (a.x - left) * perPixel;
      this.show(start, start + perPixel * width);
    }

    wheel(event) {
      const unit = [1, 16, 400][event.deltaMode];
      const focused = this.shadowRoot.activeElement === this.board;
      const sideways = event.shiftKey && !event.deltaX ? event.deltaY : event.deltaX;
      if (event.ctrlKey || event.metaKey || (focused && !event.shiftKey && Math.abs(event.deltaY) >= Math.abs(event.deltaX))) {
        this.zoom(Math.exp(Math.min(Math.max(event.deltaY * unit, -300), 300) / 300), this.timeAt(event.clientX));
      } else if (sideways && (focused || this.view.end - this.view.start < this.span)) {
        this.pan((sideways * unit) / this.ticks.clientWidth);
      } else return; // the page scrolls: a timeline must not catch a reader passing by
      event.preventDefault();
    }
  }

  // Adds an item to the columns it lies in; its busy time is taken as evenly spread between its start and end.
  function spread(bin, from, to, busy) {
    if (to <= from) to = from + 1e-9; // an instant still leaves a mark
    const density = Math.max(busy, 1e-9) / (to - from);
    const last = Math.min(to, bin.length);
    for (let x = Math.max(from, 0); x < last; x = Math.floor(x) + 1) {
      bin[Math.floor(x)] += (Math.min(Math.floor(x) + 1, last) - x) * density;
    }
  }

  customElements.define(TAG, Timeline);
})();
