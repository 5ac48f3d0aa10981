// Keeps the times on the pages of the live locks going. The server's clock gave the seconds; from
// there on only time that has passed is counted, so that a wrong clock here changes nothing.
"use strict";
(function () {
  function clock(seconds) {
    const whole = Math.max(0, Math.floor(seconds));
    const two = (number) => String(number).padStart(2, "0");
    const hours = Math.floor(whole / 3600);
    const minutes = Math.floor(whole / 60) % 60;
    return (hours ? hours + ":" + two(minutes) : minutes) + ":" + two(whole % 60);
  }

  // When the answer came, not when this ran: a slow page must not make locks look younger.
  const navigation = performance.getEntriesByType("navigation")[0];
  const page = document.documentElement.dataset;
  page.dlCame = navigation ? navigation.responseStart : performance.now(); // then set by refresh.js

  function tick() {
    const passed = (performance.now() - Number(page.dlCame)) / 1000;
    for (const cell of document.querySelectorAll("[data-dl-left]")) {
      const left = Number(cell.dataset.dlLeft) - passed;
      cell.textContent = left > 0 ? clock(left) : cell.dataset.dlOver;
    }
    for (const cell of document.querySelectorAll("[data-dl-since]")) {
      cell.textContent = clock(Number(cell.dataset.dlSince) + passed);
    }
  }

  document.addEventListener("DOMContentLoaded", function () {
    tick();
    setInterval(tick, 1000);
  });
})();
