// The behaviour of a page: theme, menu, search, copying, tabs. No request goes anywhere; without this script the page still reads.
(() => {
  'use strict';
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const one = (selector, root = document) => root.querySelector(selector);
  const root = document.documentElement;

  // light and dark: the reader's choice if there is one, else what the system says
  const system = matchMedia('(prefers-color-scheme: dark)');
  const dark = () => (root.dataset.theme || (system.matches ? 'dark' : 'light')) === 'dark';
  const toggle = one('.mg-theme');
  const show = () => toggle.setAttribute('aria-pressed', dark());
  toggle.addEventListener('click', () => {
    root.dataset.theme = dark() ? 'light' : 'dark';
    try { localStorage.setItem('minigpt-theme', root.dataset.theme); } catch (e) { /* a private window forgets */ }
    show();
  });
  system.addEventListener('change', show);
  show();

  // the chapters on a narrow screen
  const menu = one('.mg-menu'), side = one('.mg-side');
  const here = one('[aria-current]', side);
  const reveal = () => { if (here) side.scrollTop = here.offsetTop - side.clientHeight / 2; };  // a long list starts where the reader is
  reveal();
  const open = (yes) => { menu.setAttribute('aria-expanded', yes); side.classList.toggle('mg-open', yes); if (yes) reveal(); };
  menu.addEventListener('click', () => open(menu.getAttribute('aria-expanded') !== 'true'));
  document.addEventListener('keydown', (e) => {
    if (e.key === 'Escape' && side.classList.contains('mg-open')) { open(false); menu.focus(); }
  });
  document.addEventListener('click', (e) => { if (!side.contains(e.target) && e.target !== menu) open(false); });

  // the table of contents: folded on a narrow screen, following the reader on a wide one
  const toc = one('.mg-toc details'), wide = matchMedia('(min-width: 75rem)');
  if (toc) {
    const fold = () => { toc.open = wide.matches; };
    fold();
    wide.addEventListener('change', fold);
    const links = all('a', toc);
    const heads = links.map((a) => document.getElementById(decodeURIComponent(a.hash.slice(1))));
    let waiting = false;
    const follow = () => {
      waiting = false;
      let now = -1;
      heads.forEach((h, i) => { if (h && h.getBoundingClientRect().top < 120) now = i; });
      links.forEach((a, i) => (i === now ? a.setAttribute('aria-current', 'true') : a.removeAttribute('aria-current')));
    };
    addEventListener('scroll', () => { if (!waiting) { waiting = true; requestAnimationFrame(follow); } }, { passive: true });
    follow();
  }

  // what scrolls sideways can be reached with the keyboard
  const boxes = all('pre, .mg-scroll, .mg-eq');
  const more = (box) => box.classList.toggle('mg-more', box.scrollLeft + box.clientWidth < box.scrollWidth - 2);
  const reach = () => boxes.forEach((box) => {
    if (box.scrollWidth > box.clientWidth + 1) box.tabIndex = 0; else box.removeAttribute('tabindex');
    more(box);
  });
  boxes.forEach((box) => box.addEventListener('scroll', () => more(box), { passive: true }));
  reach();
  addEventListener('resize', reach);
  addEventListener('load', reach);

  // copying
  const copy = async (text) => {
    try { await navigator.clipboard.writeText(text); return true; } catch (e) { /* not allowed from a folder in some browsers */ }
    const area = document.createElement('textarea');
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand('copy');
    area.remove();
    return done;
  };
  all('.mg-copy').forEach((button) => button.addEventListener('click', async () => {
    button.textContent = (await copy(one('pre', button.parentElement).textContent)) ? 'Copied' : 'Press Ctrl-C';
    button.focus();
    setTimeout(() => { button.textContent = 'Copy'; }, 1500);
  }));

  // tabs
  all('.mg-tabs').forEach((bar) => {
    const tabs = all('[role=tab]', bar);
    const pick = (tab) => tabs.forEach((t) => {
      const on = t === tab;
      t.setAttribute('aria-selected', on);
      t.tabIndex = on ? 0 : -1;
      document.getElementById(t.getAttribute('aria-controls')).hidden = !on;
    });
    tabs.forEach((tab, i) => {
      tab.addEventListener('click', () => { pick(tab); reach(); });
      tab.addEventListener('keydown', (e) => {
        const step = { ArrowRight: 1, ArrowLeft: -1 }[e.key];
        if (!step) return;
        const next = tabs[(i + step + tabs.length) % tabs.length];
        pick(next);
        next.focus();
      });
    });
  });

  // search: the index is a script of its own, loaded when the reader first goes there
  const form = one('.mg-search'), input = one('input', form), list = one('.mg-results', form);
  let loading = null;
  const index = () => loading || (loading = new Promise((done) => {
    const script = document.createElement('script');
    script.src = 'assets/search.js';
    script.onload = () => done(window.minigptSearch.map((e) => ({ ...e, name: (e.d || '').toLowerCase(), head: `${e.h || ''} ${e.h ? '' : e.p}`.toLowerCase(),
      text: `${e.p} ${e.h || ''} ${e.d || ''} ${e.t}`.toLowerCase() })));
    script.onerror = () => done([]);
    document.head.append(script);
  }));
  const escape = (s) => s.replace(/[&<>"]/g, (c) => ({ '&': '&amp;', '<': '&lt;', '>': '&gt;', '"': '&quot;' }[c]));
  const mark = (text, words) => {
    const low = text.toLowerCase();
    const hits = words.map((w) => low.indexOf(w)).filter((i) => i >= 0);
    const near = Math.max(0, (hits.length ? Math.min(...hits) : 0) - 40);
    const from = near && text.indexOf(' ', near) + 1;  // at the start of a word
    const piece = (from ? '…' : '') + text.slice(from, from + 150) + (from + 150 < text.length ? '…' : '');
    const pattern = new RegExp(`(${words.map((w) => w.replace(/[.*+?^${}()|[\]\\]/g, '\\$&')).join('|')})`, 'gi');
    return piece.split(pattern).map((s, i) => (i % 2 ? `<mark>${escape(s)}</mark>` : escape(s))).join('');
  };
  const find = async () => {
    const query = input.value.trim().toLowerCase(), words = query.split(/\s+/).filter(Boolean);
    if (query.length < 2) { list.hidden = true; return; }
    const entries = await index();
    if (input.value.trim().toLowerCase() !== query) return;
    const scored = [];
    entries.forEach((e, i) => {
      if (!words.every((w) => e.text.includes(w))) return;
      let score = e.text.includes(query) ? 4 : 0;
      for (const w of words) score += (e.name === w ? 40 : e.name.includes(w) ? 12 : 0) + (e.head.includes(w) ? 8 : 0);
      scored.push([score, i, e]);
    });
    scored.sort((a, b) => b[0] - a[0] || a[1] - b[1]);
    list.innerHTML = scored.length
      ? `<p class="mg-count" role="status">${scored.length} ${scored.length === 1 ? 'place' : 'places'}</p>` + scored.slice(0, 12).map(([, , e]) =>
        `<a href="${escape(e.u)}"><b>${e.d ? `<code>${escape(e.d)}</code>` : escape(e.h || e.p)}</b> <small>${e.d ? `defined in ${escape(e.p)}` : e.h ? escape(e.p) : ''}</small><span>${mark(e.t, words)}</span></a>`).join('')
      : '<p class="mg-count" role="status">Nothing found</p>';
    list.hidden = false;
  };
  let timer = 0;
  input.addEventListener('focus', index);
  input.addEventListener('input', () => { clearTimeout(timer); timer = setTimeout(find, 80); });
  form.addEventListener('submit', (e) => { e.preventDefault(); const first = one('a', list); if (first && !list.hidden) first.click(); });
  form.addEventListener('keydown', (e) => {
    if (e.key === 'Escape') { list.hidden = true; input.value = ''; input.focus(); return; }
    if (e.key !== 'ArrowDown' && e.key !== 'ArrowUp') return;
    const stops = [input, ...(list.hidden ? [] : all('a', list))];
    const next = stops[stops.indexOf(document.activeElement) + (e.key === 'ArrowDown' ? 1 : -1)];
    if (next) { e.preventDefault(); next.focus(); }
  });
  list.addEventListener('click', (e) => { if (e.target.closest('a')) list.hidden = true; });
  document.addEventListener('click', (e) => { if (!form.contains(e.target)) list.hidden = true; });
  form.addEventListener('focusout', (e) => { if (e.relatedTarget && !form.contains(e.relatedTarget)) list.hidden = true; });
  document.addEventListener('keydown', (e) => {
    if (e.key === '/' && !e.ctrlKey && !e.metaKey && !e.altKey && !/^(INPUT|TEXTAREA|SELECT)$/.test(document.activeElement.tagName)) {
      e.preventDefault();
      input.focus();
    }
  });
})();
