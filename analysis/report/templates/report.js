"use strict";
// Figures: zoom and move by the viewBox; the text of the mark under the pointer, or of one after the other by keys. The page
// is complete without scripts.
(() => {
  const tip = document.createElement("div");
  tip.id = "tip";
  tip.hidden = true;
  tip.setAttribute("role", "status");
  document.body.append(tip);

  const boxOf = (svg) => svg.getAttribute("viewBox").split(/[ ,]+/).map(Number);

  // make one drawing interactive: a panel, or a whole figure
  const makeInteractive = (svg) => {
    const home = boxOf(svg);
    let found = null;
    const marks = () => found ??= [...svg.querySelectorAll("use > title")].map((title) => {
      const use = title.parentNode, text = title.textContent;
      title.remove();                         // otherwise the browser shows it, too
      return { x: Number(use.getAttribute("x")), y: Number(use.getAttribute("y")), text };
    });
    const fingers = new Map();
    let box = [...home], pinch = 0, chosen = -1;

    const show = () => {
      svg.setAttribute("viewBox", box.join(" "));
      svg.classList.toggle("zoomed", box[2] < home[2]);
    };
    const at = (event) => new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
    const zoom = (factor, point) => {
      const wide = clamp(box[2] * factor, home[2] / 40, home[2]), by = wide / box[2];
      const moved = [point.x - (point.x - box[0]) * by, point.y - (point.y - box[1]) * by];
      box = [moved[0], moved[1], wide, box[3] * by];
      move(0, 0);
    };
    const move = (dx, dy) => {
      box[0] = clamp(box[0] + dx, home[0], home[0] + home[2] - box[2]);
      box[1] = clamp(box[1] + dy, home[1], home[1] + home[3] - box[3]);
      show();
    };
    const middle = () => ({ x: box[0] + box[2] / 2, y: box[1] + box[3] / 2 });
    const place = (mark) => new DOMPoint(mark.x, mark.y).matrixTransform(svg.getScreenCTM());
    const say = (mark, x, y) => {
      tip.hidden = false;
      tip.textContent = mark.text;
      const above = y - tip.offsetHeight - 12;
      // within the window now, and with the figure when the page scrolls
      tip.style.left = `${scrollX + clamp(x + 14, 4, innerWidth - tip.offsetWidth - 4)}px`;
      tip.style.top = `${scrollY + (above > 4 ? above : y + 16)}px`;
    };
    const showTip = (event, reach) => {
      let best = null, least = reach;
      for (const mark of marks()) {
        const { x, y } = place(mark), away = Math.hypot(x - event.clientX, y - event.clientY);
        if (away < least) { least = away; best = mark; }
      }
      if (best === null) tip.hidden = true;
      else say(best, event.clientX, event.clientY);
    };
    const step = (by) => {
      const own = marks();
      if (own.length === 0) return;
      chosen = chosen < 0 && by < 0 ? own.length - 1 : (chosen + by + own.length) % own.length;
      const { x, y } = place(own[chosen]);
      say(own[chosen], x, y);
    };
    const isWhole = () => box[2] >= home[2];

    svg.tabIndex = 0;
    svg.addEventListener("pointerenter", marks);
    svg.setAttribute("aria-keyshortcuts", "ArrowLeft ArrowRight ArrowUp ArrowDown + - 0 Escape");
    svg.addEventListener("blur", () => { tip.hidden = true; });
    svg.addEventListener("wheel", (event) => {
      // the wheel scrolls the page; it zooms only a figure that has the focus, or with Ctrl
      if (!event.ctrlKey && document.activeElement !== svg) return;
      event.preventDefault();
      zoom(Math.exp(clamp(event.deltaY, -60, 60) / 200), at(event));
    }, { passive: false });
    svg.addEventListener("pointerdown", (event) => {
      fingers.set(event.pointerId, event);
      if (box[2] < home[2] || fingers.size > 1) svg.setPointerCapture(event.pointerId);
      pinch = 0;
      showTip(event, event.pointerType === "touch" ? 28 : 14);
    });
    svg.addEventListener("pointermove", (event) => {
      const before = fingers.get(event.pointerId);
      if (!before) { if (event.pointerType !== "touch") showTip(event, 14); return; }
      fingers.set(event.pointerId, event);
      if (fingers.size === 2) {
        const [one, other] = [...fingers.values()];
        const apart = Math.hypot(one.clientX - other.clientX, one.clientY - other.clientY);
        const between = { clientX: (one.clientX + other.clientX) / 2, clientY: (one.clientY + other.clientY) / 2 };
        if (pinch) zoom(pinch / apart, at(between));
        pinch = apart;
      } else if (box[2] < home[2]) {
        const scale = svg.getScreenCTM().a;
        move((before.clientX - event.clientX) / scale, (before.clientY - event.clientY) / scale);
        tip.hidden = true;
      }
    });
    for (const name of ["pointerup", "pointercancel", "pointerleave"]) {
      svg.addEventListener(name, (event) => {
        fingers.delete(event.pointerId);
        pinch = 0;
        if (name === "pointerleave" && event.pointerType !== "touch") tip.hidden = true;
      });
    }
    // two fingers zoom the figure; one finger scrolls the page unless the figure is zoomed
    svg.addEventListener("touchmove", (event) => { if (event.touches.length > 1) event.preventDefault(); }, { passive: false });
    svg.addEventListener("dblclick", (event) => zoom(0.5, at(event)));
    const keys = { "+": () => zoom(0.7, middle()), "=": () => zoom(0.7, middle()), "-": () => zoom(1.4, middle()),
      "0": () => { box = [...home]; show(); },
      ArrowLeft: () => isWhole() ? step(-1) : move(-box[2] / 8, 0), ArrowRight: () => isWhole() ? step(1) : move(box[2] / 8, 0),
      ArrowUp: () => move(0, -box[3] / 8), ArrowDown: () => move(0, box[3] / 8) };
    svg.addEventListener("keydown", (event) => {
      const act = keys[event.key];
      if (!act || event.ctrlKey || event.metaKey || (/ArrowUp|ArrowDown/.test(event.key) && isWhole())) return;
      event.preventDefault();
      act();
    });

    return { nearer: () => zoom(0.7, middle()), farther: () => zoom(1.4, middle()), whole: keys["0"] };
  };

  const wholes = [];
  for (const figure of document.querySelectorAll("figure")) {
    const drawings = [...figure.querySelectorAll("svg.figure")].map(makeInteractive);
    const tools = figure.querySelector(".tools");
    wholes.push(...drawings.map((one) => one.whole));
    const buttons = [["+", "zoom in"], ["−", "zoom out"], ["⟲", "show all"]].map(([sign, description]) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = sign;
      button.title = description;
      button.setAttribute("aria-label", description);
      return button;
    });
    buttons[0].onclick = () => drawings.forEach((one) => one.nearer());
    buttons[1].onclick = () => drawings.forEach((one) => one.farther());
    buttons[2].onclick = () => drawings.forEach((one) => one.whole());
    tools.prepend(...buttons);

    // PNG and SVG files are made from the drawings in the page, in the colours of the light mode
    const home = figure.dataset.box.split(" ").map(Number);
    const drawing = () => {
      const copy = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      copy.setAttribute("viewBox", home.join(" "));
      copy.setAttribute("width", `${home[2]}pt`);
      copy.setAttribute("height", `${home[3]}pt`);
      copy.setAttribute("style", "stroke-linejoin:round;stroke-linecap:butt;background:#fff");
      for (const svg of figure.querySelectorAll("svg.figure, svg.key")) copy.append(...svg.cloneNode(true).childNodes);
      return new XMLSerializer().serializeToString(copy).replace(/var\(--[a-z]+, (#[0-9a-f]{6})\)/g, "$1");
    };
    const save = (blob, name) => {
      const link = document.createElement("a");
      link.href = URL.createObjectURL(blob);
      link.download = name;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    };
    const [png, vector] = [tools.querySelector(".png"), tools.querySelector(".svg")];
    if (png === null) continue;               // a page that stands alone has no such files
    vector.addEventListener("click", (event) => {
      event.preventDefault();
      save(new Blob([drawing()], { type: "image/svg+xml" }), vector.download);
    });
    png.addEventListener("click", (event) => {
      event.preventDefault();
      const image = new Image(), sheet = document.createElement("canvas");
      sheet.width = home[2] * 3;
      sheet.height = home[3] * 3;
      image.onload = () => {
        const pen = sheet.getContext("2d");
        pen.fillStyle = "#fff";
        pen.fillRect(0, 0, sheet.width, sheet.height);
        pen.drawImage(image, 0, 0, sheet.width, sheet.height);
        sheet.toBlob((blob) => save(blob, png.download), "image/png");
      };
      image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(drawing())}`;
    });
  }
  addEventListener("keydown", (event) => { if (event.key === "Escape") tip.hidden = true; });
  // paper has whole figures and open parts
  let closed = [];
  addEventListener("beforeprint", () => {
    wholes.forEach((show) => show());
    closed = [...document.querySelectorAll("details:not([open])")];
    closed.forEach((part) => { part.open = true; });
  });
  addEventListener("afterprint", () => closed.forEach((part) => { part.open = false; }));
})();
