"use strict";
// What the rest of the page does: choices, tables, copying, the curve as a file, methods, printing
(() => {
  const { at, say, charts, draw, paint, go, walk } = explorer;

  // Choices: a row shows its command and goes to its step

  for (const button of document.querySelectorAll(".take")) {
    button.onclick = () => {
      const row = button.closest("tr");
      say("choice-name", button.textContent);
      say("choice-step", row.dataset.step);
      say("choice-command", button.dataset.command);
      go(Number(row.dataset.step));
    };
  }

  // The curve as a file

  const quoted = (value) => (/[",\r\n]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : String(value));
  function csv() {
    const { kept, qualities, removed, names, gone, parameters, bytes, multiplications } = walk();
    const kinds = kept?.kinds ?? [];
    const left = (units, step) => units.totals.reduce((sum, total, layer) => sum + total - units.left[step][layer], 0);
    const columns = {
      ...(kept ? Object.fromEntries(kinds.map((units) => [`${units.words}_removed`, (step) => left(units, step)]))
        : { heads_removed: (step) => gone[step], removed: (step) => removed[step].map((head) => names[head]).join(" ") }),
      ...Object.fromEntries(Object.entries(qualities).map(([name, values]) => [name, (step) => values[step]])),
      parameters: (step) => parameters[step],
      bytes: (step) => bytes[step],
      ...(multiplications && { multiplications: (step) => multiplications[step] ?? "" }),
    };
    const rows = parameters.map((_, step) => [step, ...Object.values(columns).map((cell) => cell(step))]);
    return [["step", ...Object.keys(columns)], ...rows].map((row) => `${row.map(quoted).join(",")}\n`).join("");
  }
  at("csv").onclick = () => {
    at("csv").href = URL.createObjectURL(new Blob([csv()], { type: "text/csv" }));
    setTimeout(URL.revokeObjectURL, 10000, at("csv").href);
  };

  // Methods on and off, in every chart at once

  for (const box of document.querySelectorAll(".methods input")) {
    box.onchange = () => {
      for (const id of ["comparison", "comparison-parameters", "drift"]) {
        if (!charts[id]) continue;
        for (const trace of charts[id].data) if (trace.meta === box.value) trace.visible = box.checked;
        draw(id);
      }
    };
  }

  // Tables, copying, printing

  const number = (text) => Number.parseFloat(text.replaceAll(",", ""));
  for (const table of document.querySelectorAll("table.sortable")) {
    table.querySelectorAll("thead th").forEach((head, column) => {
      head.querySelector("button").onclick = () => {
        const up = head.getAttribute("aria-sort") === "descending" || (column === 0 && !head.hasAttribute("aria-sort"));
        const key = (row) => row.cells[column].textContent;
        const order = (a, b) => (Number.isNaN(number(key(a))) || Number.isNaN(number(key(b)))
          ? key(a).localeCompare(key(b), "en", { numeric: true }) : number(key(a)) - number(key(b)));
        const rows = [...table.tBodies[0].rows].sort((a, b) => (up ? order(a, b) : order(b, a)));
        table.tBodies[0].append(...rows);
        table.querySelectorAll("thead th").forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
      };
    });
  }
  for (const button of document.querySelectorAll(".copy")) {
    button.onclick = () => {
      getSelection().selectAllChildren(at(button.dataset.of));
      button.textContent = document.execCommand("copy") ? "Copied" : "Press Ctrl-C";
    };
  }
  for (const [event, printing] of [["beforeprint", true], ["afterprint", false]]) {
    addEventListener(event, () => {
      document.documentElement.classList.toggle("printing", printing);
      paint();
    });
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
})();
