"""TeX to MathML, and the font that draws it: no script and no request is needed to read a formula."""
from __future__ import annotations

import io
import re
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree as ET

from latex2mathml.converter import convert


class MathError(ValueError):
    "A formula that has no MathML, with the reason."


# Commands that latex2mathml does not know or draws badly, written in terms of what it knows.
_ALIASES = [
    (re.compile(r'\\[dt]frac\b'), r'\\frac'),
    (re.compile(r'\\operatorname\*?'), r'\\operatorname'),
    (re.compile(r'\\operatorname\{(\w+)_\{(\w+)\}\}'), r'\\operatorname{\1}_{\\mathrm{\2}}'),  # an index belongs to the name, upright
    (re.compile(r'\\(begin|end)\{aligned\}'), r'\\\1{align*}'),
    (re.compile(r'\\(text\w*|operatorname)\{((?:[^{}\\]|\\[_,])*)\}'),
     lambda m: f'\\{m[1]}{{' + m[2].replace(r'\_', '_').replace(r'\,', ' ') + '}'),
]

_ARITY = dict(mfrac=2, msub=2, msup=2, msubsup=3, munder=2, mover=2, munderover=3, mroot=2)
_FUNCTIONS = set('arg argmax argmin cos cosh det dim exp gcd inf lim ln log max min mod Pr sin sinh sup tan tanh'.split())
_SIGNS = {'±': '±', '~': '∼', '⌊': '⌊', '⌋': '⌋', '⌈': '⌈', '⌉': '⌉'}  # written as letters, meant as operators
_ORDINARY = set('∞⊤⊥∅∀∃∂∇…⋯⋮⋱ℓ')  # written as operators, meant as letters: no space around them
_VARIANTS = {'bold': (0x1d400, 0x1d41a, 0x1d7ce), 'bold-italic': (0x1d468, 0x1d482, None), 'monospace': (0x1d670, 0x1d68a, 0x1d7f6),
             'sans-serif': (0x1d5a0, 0x1d5ba, 0x1d7e2), 'double-struck': (0x1d538, 0x1d552, 0x1d7d8)}


def _styled(text, variant):
    "`text` in the Unicode letters of `variant`: browsers know the attribute `mathvariant` only as 'normal'."
    if variant not in _VARIANTS: return text
    upper, lower, digit = _VARIANTS[variant]
    def one(c):
        if 'A' <= c <= 'Z': return chr(upper + ord(c) - 65)
        if 'a' <= c <= 'z': return chr(lower + ord(c) - 97)
        if '0' <= c <= '9' and digit: return chr(digit + ord(c) - 48)
        if 'Α' <= c <= 'Ω' and 'bold' in variant: return chr((0x1d6a8 if variant == 'bold' else 0x1d71c) + ord(c) - 0x391)
        if 'α' <= c <= 'ω' and 'bold' in variant: return chr((0x1d6c2 if variant == 'bold' else 0x1d736) + ord(c) - 0x3b1)
        return c
    return ''.join(map(one, text))


def _base(e):
    "The innermost element that carries the scripts of `e`."
    while e.tag in ('msub', 'msup', 'msubsup', 'munder', 'mover', 'munderover', 'mrow') and len(e): e = e[0]
    return e


def _tidy(e):
    "Even out what latex2mathml writes, from the leaves up."
    for child in e: _tidy(child)
    if e.tag in _ARITY and len(e) != _ARITY[e.tag]: raise MathError('a command lacks an argument')
    text = e.text or ''
    if e.tag == 'mover' and e[1].text == '―':  # \\overline: the font's bar does not grow, a border does
        e.tag, e.attrib = 'mrow', {'style': 'border-top: 0.06em solid; padding-top: 0.12em'}
        e.remove(e[1])
    if e.tag in ('mi', 'mn', 'mo') and '&' in text: raise MathError('& stands outside an environment with columns')
    if e.tag == 'mi' and text in _SIGNS:
        e.tag, e.text = 'mo', _SIGNS[text]
        if text in '⌊⌋⌈⌉': e.set('stretchy', 'false')
    if e.tag == 'mo' and text in _ORDINARY: e.tag, e.attrib = 'mi', {'mathvariant': 'normal'}
    if e.tag == 'mo' and text == '/': e.attrib.update(lspace='0', rspace='0')
    if e.tag == 'mo' and text in ('|', '‖') and 'form' not in e.attrib: e.attrib.update(lspace='0', rspace='0')
    if e.tag == 'mrow' and len(e) == 1 and e[0].tag == 'mo' and e[0].text in (',', '.', ':', '='): e[0].attrib.update(lspace='0', rspace='0')
    for before, sign in zip(e, e[1:]):  # a minus after an operator is a sign, not a difference
        if sign.tag == 'mo' and sign.text in ('−', '+', '±') and before.tag == 'mo' and before.text not in (')', ']', '}', '|', '‖') and before.get('form') != 'postfix':
            sign.set('form', 'prefix')
    if e.tag == 'mo' and re.fullmatch(r'[A-Za-z ]{2,}', text): e.tag, e.attrib = 'mi', {'class': 'fn'}
    elif e.tag == 'mi' and text in _FUNCTIONS: e.set('class', 'fn')
    if e.tag in ('mi', 'mn', 'mtext') and e.get('mathvariant') in _VARIANTS:
        e.text = _styled(text, e.attrib.pop('mathvariant'))
    # \mathrm{head}: one upright word, not four letters
    children, merged = list(e), []
    for c in children:
        last = merged[-1] if merged else None
        if c.tag == 'mi' and c.get('mathvariant') == 'normal' and last is not None and last.tag == 'mi' and last.get('mathvariant') == 'normal':
            last.text += c.text
        else: merged.append(c)
    for c in merged:
        if c.tag == 'mi' and c.get('mathvariant') == 'normal' and len(c.text) > 1: del c.attrib['mathvariant']
    # a thin space around function names, as TeX sets it
    if e.tag in ('mrow', 'math', 'mtd', 'mstyle') and merged:
        spaced = []
        for i, c in enumerate(merged):
            prev = merged[i-1] if i else None
            if prev is not None:
                after, before = _base(prev).get('class') == 'fn', _base(c).get('class') == 'fn'
                if (after and c.tag not in ('mo', 'mspace') and not (c.tag == 'mrow' and len(c) and c[0].tag == 'mo')
                    or before and prev.tag not in ('mo', 'mspace') or before and prev.tag == 'mo' and prev.text in set(')]}')):
                    spaced.append(ET.Element('mspace', width='0.1667em'))
            spaced.append(c)
        merged = spaced
    if merged != children:
        for c in children: e.remove(c)
        e.extend(merged)


def _balanced(tex):
    depth = 0
    for escaped, brace in re.findall(r'(\\.)|([{}])', tex, re.S):
        if escaped: continue
        depth += 1 if brace == '{' else -1
        if depth < 0: return False
    return depth == 0


@lru_cache(maxsize=None)
def to_mathml(tex: str,  # a formula without its dollar signs
              display: bool = False,  # on a line of its own
              ) -> str:
    "MathML for `tex`. Raises `MathError` for a formula that would leave raw TeX on the page."
    src = tex.strip()
    if not src: raise MathError('the formula is empty')
    if not _balanced(src): raise MathError('its braces do not match')
    for pattern, repl in _ALIASES: src = pattern.sub(repl, src)
    if len(re.findall(r'\\left\b', src)) != len(re.findall(r'\\right\b', src)): raise MathError(r'\left and \right do not match')
    if sorted(re.findall(r'\\begin\{(\w+\*?)\}', src)) != sorted(re.findall(r'\\end\{(\w+\*?)\}', src)):
        raise MathError(r'\begin and \end do not match')
    try: tree = ET.fromstring(convert(src, xmlns='', display='block' if display else 'inline'))
    except Exception as e: raise MathError(f'{type(e).__name__}: {e}'.rstrip(': ')) from e
    for leaf in tree.iter():
        if unknown := re.search(r'\\([A-Za-z]+|.)', leaf.text or ''): raise MathError(f'{unknown[0]} is not known')
    _tidy(tree)
    tree.attrib.pop('xmlns', None)
    if not display: tree.attrib.pop('display', None)
    return ET.tostring(tree, encoding='unicode', short_empty_elements=False)


# Every character a formula of this kind of book may need; the same set each time, so the font file does not depend on the pages.
_RANGES = [(0x20, 0x7e), (0xa0, 0xff), (0x131, 0x131), (0x237, 0x237), (0x302, 0x304), (0x391, 0x3f6), (0x2010, 0x2027), (0x2032, 0x2034),
           (0x2061, 0x2064), (0x20d7, 0x20d7), (0x2102, 0x211d), (0x2124, 0x2124), (0x2190, 0x21d5), (0x2200, 0x22ff), (0x2308, 0x230b),
           (0x23de, 0x23df), (0x27e8, 0x27eb), (0x2a7d, 0x2a7e), (0x1d400, 0x1d467), (0x1d468, 0x1d49b), (0x1d49c, 0x1d4cf),
           (0x1d538, 0x1d56b), (0x1d5a0, 0x1d5d3), (0x1d670, 0x1d6a3), (0x1d6a4, 0x1d755), (0x1d7ce, 0x1d7ff)]


def _narrow_roots(font):
    """Give every size of the root sign the width of the smallest.

    A browser reserves room for the widest size it might need, so that in running text a wide gap would follow each root.
    """
    glyphs, widths = font['glyf'], font['hmtx']
    target = widths['uni221A'][0]
    for name in [n for n in font.getGlyphOrder() if n.startswith('uni221A.')]:
        glyph, (width, side) = glyphs[name], widths[name]
        if glyph.isComposite() or width <= target: continue
        glyph.coordinates.scale((target / width, 1))
        glyph.coordinates.toInt()
        glyph.recalcBounds(glyphs)
        widths[name] = (target, round(side * target / width))


@lru_cache(maxsize=1)
def math_font() -> bytes:
    """A subset of STIX Two Math (OFL 1.1, carried by the package ziamath) as woff2, byte for byte the same on every call.

    Changed from the original: fewer characters, narrower root signs, and therefore another name.
    """
    from fontTools import subset
    from fontTools.ttLib import TTFont
    source = Path(find_spec('ziamath').origin).parent / 'fonts' / 'STIXTwoMath-Regular.ttf'  # found without importing it
    font = TTFont(io.BytesIO(source.read_bytes()), recalcTimestamp=False)
    options = subset.Options(layout_features=['ssty', 'dtls', 'flac', 'ccmp', 'mark', 'mkmk'], hinting=False, notdef_outline=True,
                             name_IDs=[0, 1, 2, 3, 4, 5, 6, 13, 14])
    cutter = subset.Subsetter(options)
    cutter.populate(unicodes=[c for a, b in _RANGES for c in range(a, b+1)])
    cutter.subset(font)
    _narrow_roots(font)
    for record in font['name'].names:
        if record.nameID in (1, 3, 4, 6): record.string = 'BookMath' if record.nameID == 6 else 'Book Math'
    font.flavor = 'woff2'
    out = io.BytesIO()
    font.save(out)
    return out.getvalue()
