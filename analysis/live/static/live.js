"use strict";
// The page of ringtap live: it proves that it knows the token, listens for changed parts, and shows them.
(() => {
  const RETRY_MS = 2000, SILENT_MS = 15000, TYPED_MS = 300, SAID_MS = 6000, TOKEN_CHARACTERS = 32;
  const at = (id) => document.getElementById(id);
  const setText = (node, text) => { if (node.textContent !== text) node.textContent = text; };
  const parts = {};
  let source = null, timer = 0, watch = 0, attempt = 0, paused = false, isChosen = false, sort = "";
  let node = "", table = "", pressed = 0, forget = 0;

  // the token stands behind # of the URL, which no browser sends; it leaves the address bar and stays in this tab
  const hasToken = () => location.hash.length > TOKEN_CHARACTERS && !location.hash.includes("=");
  const takeToken = () => {
    if (!hasToken()) return;
    sessionStorage.setItem("token", location.hash.slice(1));
    history.replaceState(null, "", location.pathname);
  };

  // else #node=NODE&table=TITLE is the place that is shown, so that a bookmark leads to it
  const place = () => Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  const linkTo = (to) => `#${new URLSearchParams(Object.entries(to).filter(([, value]) => value))}`;
  const arrive = () => {
    table = place().table || "";
    if (hasToken() || (place().node || "") !== node) choose();
    reach();
  };
  const reach = () => {
    const section = table && at(`table-${table}`);
    if (!section) return;
    table = "";
    section.focus();
  };

  const proofOf = async (token, challenge) => {
    const bytes = (text) => new TextEncoder().encode(text), hash = { name: "HMAC", hash: "SHA-256" };
    const key = await crypto.subtle.importKey("raw", bytes(token), hash, false, ["sign"]);
    const signed = await crypto.subtle.sign("HMAC", key, bytes(challenge));
    return [...new Uint8Array(signed)].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  };

  const prove = async (token) => {
    const answer = await fetch("challenge", { cache: "no-store" }), challenge = await answer.text();
    return { challenge, proof: await proofOf(token, challenge) };
  };

  const say = (text, isBad) => {
    setText(at("connection"), text);
    at("connection").classList.toggle("red", isBad);
  };
  const later = () => {
    say("The connection is lost. Trying again …", true);
    clearTimeout(timer);
    timer = setTimeout(connect, RETRY_MS);
  };
  const ask = (text) => {
    say(text, true);
    at("door").hidden = false;
    at("token").focus();
  };
  const close = () => {
    clearTimeout(timer);
    clearTimeout(watch);
    if (source) source.close();
    source = null;
  };

  const connect = async () => {
    close();
    takeToken();
    node = place().node || "";
    const token = sessionStorage.getItem("token"), mine = ++attempt;
    if (!token) return ask("This page needs its token.");
    try {
      const proven = await prove(token);
      if (mine !== attempt) return;
      const query = new URLSearchParams({ ...proven, node, words: at("words").value.trim() });
      if (sort) query.set("sort", sort);
      source = new EventSource(`events?${query}`);
    } catch (error) {
      if (mine === attempt) later();
      return;
    }
    const listenAgain = () => {
      clearTimeout(watch);
      watch = setTimeout(() => { close(); later(); }, SILENT_MS);
    };
    source.onopen = () => { at("door").hidden = true; say(paused ? "Paused" : "Live", false); listenAgain(); };
    source.onmessage = (event) => { listenAgain(); receive(JSON.parse(event.data)); };
    source.onerror = () => {
      const isRefused = source.readyState === EventSource.CLOSED;  // an answer other than 200; else the connection broke
      close();
      if (isRefused) ask("The token is wrong."); else later();
    };
  };

  // a choice takes effect in a paused view, too
  const choose = () => {
    isChosen = true;
    connect();
  };

  const receive = (changed) => {
    Object.assign(parts, changed);
    if (!paused || isChosen) Object.entries(changed).forEach(([name, part]) => show(name, part));
    if (changed.head) isChosen = false;
    reach();
  };
  const show = (name, part) => {
    if (name === "head") showHead(part);
    else if (name === "nodes") showNodes(part);
    else if (name === "warnings") showWarnings(part);
    else if (name === "tunnel") setText(at("tunnel"), part);
    else if (name.startsWith("table ")) showTable(name.slice(6), part);
    else showBars(at(name), part);
  };

  // make a list of elements as long as needed, and fill each: what stays keeps its focus and its selection
  const fill = (parent, tag, items, change) => {
    while (parent.children.length > items.length) parent.lastElementChild.remove();
    items.forEach((item, number) => {
      const child = parent.children[number] || parent.appendChild(document.createElement(tag));
      change(child, item, number);
    });
  };
  const setClass = (node, words) => { if (node.className !== words) node.className = words; };

  const showHead = (head) => {
    setText(at("name"), head.name);
    document.title = `${head.lines[0].map(([text]) => text).join("")} – ${head.name}`;
    setText(at("ending"), head.ending);
    fill(at("lines"), "p", head.lines, (line, spans) =>
      fill(line, "span", spans, (span, [text, style]) => { setText(span, text); setClass(span, style); }));
  };

  const showNodes = ({ names, shown }) => {
    at("choose").hidden = names.length < 2;
    fill(at("node"), "option", ["", ...names], (option, name) => {
      option.value = name;
      setText(option, name || "all");
    });
    if (at("node").value !== shown) at("node").value = shown;
    at("contents").querySelectorAll("a").forEach((link) => { link.href = linkTo({ node: shown, table: link.textContent }); });
  };

  // a warning is announced once, when it appears
  const showWarnings = (warnings) => {
    const list = at("warnings"), shown = new Map([...list.children].map((item) => [item.textContent, item]));
    for (const [text, item] of shown) if (!warnings.includes(text)) item.remove();
    for (const text of warnings) {
      if (shown.has(text)) continue;
      const item = document.createElement("li");
      item.textContent = text;
      list.append(item);
    }
  };

  const MEANINGS = { "•": "slow", "▲": "cut", "×": "skipped", "▾": "marked" };
  const showBars = (section, part) => {
    section.hidden = part.heights.length === 0;
    setText(section.querySelector(".range"), part.range);
    const bars = section.querySelector(".bars"), symbols = [...part.symbols];
    const counts = Object.entries(MEANINGS).map(([symbol, word]) => [symbols.filter((one) => one === symbol).length, word]);
    const texts = counts.filter(([count]) => count).map(([count, word]) => `, ${count} ${word}`);
    bars.setAttribute("aria-label", `The last ${part.heights.length}, ${part.range}${texts.join("")}`);
    fill(bars, "i", part.heights, (bar, height, number) => {
      bar.style.height = `${height}%`;
      bar.dataset.symbol = symbols[number].trim();
    });
  };

  const sectionOf = (title) => {
    const id = `table-${title}`;
    if (at(id)) return at(id);
    const section = document.createElement("section");
    section.id = id;
    section.tabIndex = -1;
    section.setAttribute("aria-labelledby", `${id}-head`);
    section.innerHTML = '<h2></h2><div class="wide" tabindex="0" role="region"><table><thead><tr></tr></thead><tbody></tbody></table></div>'
      + '<p class="faint"></p>';
    section.querySelector("h2").id = `${id}-head`;
    section.querySelector("h2").textContent = title;
    section.querySelector(".wide").setAttribute("aria-labelledby", `${id}-head`);
    at("tables").append(section);
    const link = document.createElement("a"), item = document.createElement("li");
    link.href = linkTo({ node, table: title });
    link.textContent = title;
    item.append(link);
    at("contents").append(item);
    return section;
  };

  const SIGNS = { red: "‼ ", yellow: "⚠ " };  // not by colour alone
  const showTable = (title, table) => {
    const section = sectionOf(title), wide = section.querySelector(".wide");
    wide.hidden = table.rows.length === 0;
    const more = table.more ? `${table.more} more rows are not shown. Type words that a row must have.` : "";
    setText(section.querySelector("p"), table.reason || more);
    fill(wide.querySelector("thead tr"), "th", table.heads, (cell, [text, isNumber], number) => {
      const isSorted = table.sort && table.sort[0] === number, descending = Boolean(isSorted && table.sort[1]);
      cell.scope = "col";
      setClass(cell, isNumber ? "n" : "");
      cell.setAttribute("aria-sort", isSorted ? (descending ? "descending" : "ascending") : "none");
      const button = cell.firstElementChild || cell.appendChild(document.createElement("button"));
      button.type = "button";
      setText(button, `${text}${isSorted ? (descending ? " ▼" : " ▲") : ""}`);
      button.onclick = () => {
        // numbers first show the largest, texts the first letters
        const down = isSorted ? !descending : isNumber;
        sort = `${title},${number},${down ? "descending" : "ascending"}`;
        choose();
      };
    });
    const isAtEnd = wide.scrollTop + wide.clientHeight >= wide.scrollHeight - 1;
    fill(wide.querySelector("tbody"), "tr", table.rows, (row, [style, ...texts]) => {
      setClass(row, style);
      if (!row.firstElementChild) row.appendChild(document.createElement("th")).scope = "row";
      fill(row, "td", texts, (cell, text, number) => {
        setText(cell, `${(number === 0 && SIGNS[style]) || ""}${text}`);
        setClass(cell, table.heads[number][1] ? "n" : "text");
      });
    });
    if (table.from_end && isAtEnd) wide.scrollTop = wide.scrollHeight;
  };

  at("door").addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem("token", at("token").value.trim().replace(/^.*#/, ""));
    at("token").value = "";
    connect();
  });
  at("words").addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(choose, TYPED_MS);
  });
  at("pause").addEventListener("click", () => {
    paused = !paused;
    at("pause").setAttribute("aria-pressed", String(paused));
    if (!paused) Object.entries(parts).forEach(([name, part]) => show(name, part));
    if (source) say(paused ? "Paused" : "Live", false);
  });

  at("node").addEventListener("change", () => {
    const link = linkTo({ node: at("node").value });
    history.pushState(null, "", link === "#" ? location.pathname : link);
    arrive();
  });
  at("contents").addEventListener("click", () => setTimeout(arrive));  // to a table that the hash names already
  addEventListener("hashchange", arrive);

  // the moment of a mark is that of the click; the server subtracts the time until then, as the clocks may differ
  const openMark = (isOpen) => {
    at("mark-form").hidden = !isOpen;
    at("mark").setAttribute("aria-expanded", String(isOpen));
    at(isOpen ? "mark-text" : "mark").focus();
  };
  const tell = (text) => {
    setText(at("said"), text);
    clearTimeout(forget);
    forget = setTimeout(() => setText(at("said"), ""), SAID_MS);
  };
  at("mark").addEventListener("click", () => {
    pressed = performance.now();
    openMark(true);
  });
  at("mark-cancel").addEventListener("click", () => openMark(false));
  at("mark-form").addEventListener("keydown", (event) => { if (event.key === "Escape") openMark(false); });
  at("mark-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    const text = at("mark-text").value.trim();
    try {
      const proven = await prove(sessionStorage.getItem("token") || "");
      const body = new URLSearchParams({ ...proven, text, age_s: (performance.now() - pressed) / 1000 });
      const answer = await fetch("mark", { method: "POST", body });
      if (!answer.ok) return tell(await answer.text());
    } catch (error) {
      return tell("The mark is not written: the connection is lost.");
    }
    at("mark-text").value = "";
    openMark(false);
    tell(text ? `Marked: ${text}` : "Marked");
  });
  table = place().table || "";
  connect();
})();
