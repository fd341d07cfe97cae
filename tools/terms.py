"""What the pages add to the text by themselves: the colours of axis names, and links from a term to the glossary."""
from __future__ import annotations

import html, re
from dataclasses import dataclass

AXES = {'B': 'B', 'T': 'T', 'Tq': 'T', 'Tk': 'T', 'C': 'C', 'd': 'C', 'H': 'H', 'V': 'V'}  # name -> the axis whose colour it has
_PLAIN = {'L', 'e', 'N', 'n', '...'}  # may stand beside axis names in a shape, without a colour of their own
_WORDS = re.compile(r'[*\w.]+')
_STRING = re.compile(r'(<span class="s2">(?:"|&quot;))([\w*. ]+)((?:"|&quot;)</span>)')
_COMMENT = re.compile(r'(<span class="c1">)(#[^<]*)(</span>)')


def _word(word): return f'<b class="mg-axis-{AXES[word]}">{word}</b>' if word in AXES else word


def _is_shape(words):
    names = [w.lstrip('*') for w in words]
    return any(n in AXES for n in names) and all(n in AXES or n in _PLAIN or n.isdigit() for n in names)


def shape(text: str) -> str | None:
    "A shape such as `B T C` or `(B, T, 128)` as HTML, each axis name in its colour; None if the text is no shape."
    if not re.fullmatch(r'\(?[\w*. ,]+\)?', text) or not _is_shape(_WORDS.findall(text)): return None
    return re.sub(r'\w+', lambda m: _word(m[0]), html.escape(text, quote=False))


def coloured_axes(code: str) -> str:
    "Highlighted code with the axis names in its type strings, and in comments that are shapes, in their colours."
    def string(m):
        inner = shape(m[2])
        return m[0] if inner is None else m[1] + inner + m[3]
    def comment(m):
        parts = [part.strip() for part in m[2].lstrip('# ').split('-&gt;')]
        if not all(part and _is_shape(_WORDS.findall(part)) and re.fullmatch(r'[\w* ]+', part) for part in parts): return m[0]
        return m[1] + re.sub(r'\b\w+\b(?!;)', lambda w: _word(w[0]), m[2]) + m[3]
    return _COMMENT.sub(comment, _STRING.sub(string, code))


@dataclass(frozen=True)
class Term:
    forms: tuple  # how the text writes it: 'logits', 'logit'
    target: str  # glossary.html#logits


def read_terms(soup, page: str) -> list[Term]:
    "The terms of a glossary page: each `dt` has an id, and its forms in `data-forms`, separated by commas."
    return [Term(tuple(f.strip() for f in (dt.get('data-forms') or dt.get_text()).split(',')), f'{page}#{dt["id"]}') for dt in soup.select('dl.mg-glossary dt[id]')]


def first_uses(texts: list[str], terms: list[Term]) -> list[tuple[int, int, int, str]]:
    """Where each term is first used in these pieces of text: (piece, start, end, target), in order.

    The longest term wins where several fit, so that *attention weights* is not a use of *attention*."""
    by_form = {form.lower(): term.target for term in terms for form in term.forms}
    if not by_form: return []
    pattern = re.compile(r'(?<![\w-])(' + '|'.join(re.escape(f).replace(r'\ ', r'\s+') for f in sorted(by_form, key=len, reverse=True)) + r')(?![\w-])', re.I)
    found, seen = [], set()
    for i, text in enumerate(texts):
        for m in pattern.finditer(text):
            target = by_form[' '.join(m[0].lower().split())]
            if target not in seen:
                seen.add(target)
                found.append((i, m.start(), m.end(), target))
    return found
