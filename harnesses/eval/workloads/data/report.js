"use strict";
// The page can be read without this. It adds switches for the policies and values under the pointer.
(() => {
  document.documentElement.classList.add("scripted");

  for (const box of document.querySelectorAll(".legend input")) {
    box.hidden = false;
    box.addEventListener("change", () => {
      for (const part of document.getElementsByClassName(box.dataset.key)) {
        part.classList.toggle("off", !box.checked);
      }
    });
    box.checked = true;
  }

  const tip = document.createElement("div");
  tip.id = "tip";
  tip.hidden = true;
  document.body.append(tip);
  const show = (event, text) => {
    tip.textContent = text;
    tip.hidden = false;
    const { offsetWidth: width, offsetHeight: height } = tip;
    const left = event.clientX + 14 + width > innerWidth ? event.clientX - width - 14 : event.clientX + 14;
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${Math.min(event.clientY + 14, innerHeight - height - 4)}px`;
  };
  const hide = () => { tip.hidden = true; };

  // Titles of bars and sessions: shown at once, in the look of the page.
  for (const title of document.querySelectorAll("svg g > title")) {
    const group = title.parentNode;
    const text = title.textContent;
    group.setAttribute("aria-label", text);
    title.remove();
    group.addEventListener("pointermove", (event) => show(event, text));
    group.addEventListener("pointerleave", hide);
  }

  // Lines: the value of each policy at the pointer, read from the lines themselves.
  const axis = (text) => {
    const [low, high, kind] = text.split(" ");
    const from = kind ? Math.log(low) : Number(low);
    const to = kind ? Math.log(high) : Number(high);
    return (share) => (kind ? Math.exp(from + share * (to - from)) : from + share * (to - from));
  };
  const written = (value) =>
    value.toLocaleString("en", { maximumFractionDigits: value < 1 ? 2 : value < 100 ? 1 : 0 });
  for (const chart of document.querySelectorAll("svg.lines")) {
    const x = axis(chart.dataset.x);
    const y = axis(chart.dataset.y);
    const height = Number(chart.getAttribute("height"));
    const curves = [...chart.querySelectorAll(".curve")].map((path) => ({
      path,
      points: path.getAttribute("d").slice(1).split("L").map((point) => point.split(" ").map(Number)),
    }));
    const cursor = document.createElementNS("http://www.w3.org/2000/svg", "line");
    cursor.setAttribute("class", "cursor off");
    cursor.setAttribute("y1", 0);
    cursor.setAttribute("y2", height);
    chart.append(cursor);
    chart.addEventListener("pointermove", (event) => {
      const box = chart.getBoundingClientRect();
      const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
      const lines = [];
      for (const { path, points } of curves) {
        if (path.classList.contains("off")) continue;
        let last = points[0];
        for (const point of points) {
          if (point[0] > share * 1000) break;
          last = point;
        }
        lines.push(`${path.dataset.name}: ${written(y(1 - last[1] / height))}`);
      }
      cursor.setAttribute("x1", `${share * 100}%`);
      cursor.setAttribute("x2", `${share * 100}%`);
      cursor.classList.remove("off");
      show(event, [`at ${written(x(share))} s`, ...lines].join("\n"));
    });
    chart.addEventListener("pointerleave", () => {
      cursor.classList.add("off");
      hide();
    });
  }

  // On paper nothing can be unfolded.
  addEventListener("beforeprint", () => {
    for (const part of document.querySelectorAll("details")) part.open = true;
  });
})();
