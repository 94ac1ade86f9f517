r"""Normal forms of answers: one LaTeX spelling per symbol, and exact values of everyday numbers.

The same number is written as 1,000, 1\,000, \$1000, 1000 dollars, 1e3, 1 thousand, 10³ or one thousand. All of these
are read here, exactly and without a parser.
"""

from __future__ import annotations

import decimal
import functools
import math
import re
from fractions import Fraction
from typing import Any, NamedTuple

LONGEST = 2000
"""Longer answers (in characters) are compared as plain text."""

_EXACT = decimal.Context(prec=2 * LONGEST, Emin=-(10**6), Emax=10**6)

# ---- Characters.

_SYMBOLS = {
    "−": "-", "‐": "-", "‑": "-", "‒": "-", "–": "-", "﹣": "-", "×": r"\times ", "✕": r"\times ", "⋅": r"\cdot ",
    "·": r"\cdot ", "∙": r"\cdot ", "÷": r"\div ", "±": r"\pm ", "∓": r"\mp ", "∞": r"\infty ", "≤": r"\leq ",
    "≥": r"\geq ", "⩽": r"\leq ", "⩾": r"\geq ", "≠": r"\neq ", "≈": r"\approx ", "≡": r"\equiv ", "∪": r"\cup ",
    "∩": r"\cap ", "∈": r"\in ", "∉": r"\notin ", "∅": r"\emptyset ", "⊂": r"\subset ", "⊆": r"\subseteq ",
    "∖": r"\setminus ", "→": r"\to ", "⇒": r"\Rightarrow ", "⇔": r"\Leftrightarrow ", "∠": r"\angle ",
    "△": r"\triangle ", "∧": r"\land ", "∨": r"\lor ", "°": r"^\circ ", "º": r"^\circ ", "′": "'", "″": "''",
    "’": "'", "‘": "'", "“": '"', "”": '"', "⁄": "/", "∕": "/", "∶": ":", "…": "...", "⟨": r"\langle ",
    "⟩": r"\rangle ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℚ": r"\mathbb{Q}", "ℕ": r"\mathbb{N}",
    "ℂ": r"\mathbb{C}", "℃": r"^\circ C", "℉": r"^\circ F", "。": ".", "、": ",", "【": "[", "】": "]", "α": r"\alpha ",
    "β": r"\beta ", "γ": r"\gamma ", "δ": r"\delta ", "ε": r"\epsilon ", "θ": r"\theta ", "λ": r"\lambda ",
    "μ": r"\mu ", "π": r"\pi ", "ρ": r"\rho ", "σ": r"\sigma ", "τ": r"\tau ", "φ": r"\phi ", "ψ": r"\psi ",
    "ω": r"\omega ", "Δ": r"\Delta ", "Σ": r"\Sigma ", "Ω": r"\Omega ", "ℓ": r"\ell ",
}  # fmt: skip
_FRACTIONS = {
    "½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅖": "2/5", "⅗": "3/5", "⅘": "4/5",
    "⅙": "1/6", "⅚": "5/6", "⅛": "1/8", "⅜": "3/8", "⅝": "5/8", "⅞": "7/8", "⅐": "1/7", "⅑": "1/9", "⅒": "1/10",
}  # fmt: skip
_TABLE: dict[int, str | None] = {ord(c): text for c, text in _SYMBOLS.items()}
_TABLE |= {ord(c): r" \frac{{{}}}{{{}}}".format(*text.split("/")) for c, text in _FRACTIONS.items()}
_TABLE |= {wide: chr(wide - 0xFEE0) for wide in range(0xFF01, 0xFF5F)}  # of East Asian keyboards
_TABLE |= dict.fromkeys([0x200B, 0x200C, 0x200D, 0x2060, 0xFEFF, 0x00AD, 0x200E, 0x200F, 0xFE0F])  # invisible
_TABLE |= dict.fromkeys([0x00A0, 0x2002, 0x2003, 0x2009, 0x200A, 0x202F, 0x205F, 0x3000], " ")
_SUPER = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱˣ", "0123456789+-()nix")
_SUB = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋₍₎ₙₓ", "0123456789+-()nx")
_SUPERS = re.compile(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱˣ]+")
_SUBS = re.compile(r"[₀₁₂₃₄₅₆₇₈₉₊₋₍₎ₙₓ]+")
_RADICAL = re.compile(r"(?:√|(?<![a-zA-Z\\])sqrt)\s*(?:\(([^()]*)\)|(\d+(?:\.\d+)?|[a-zA-Z]))?")


def in_latex(text: str) -> str:
    r"""Replaces Unicode by LaTeX and ASCII, e.g. x² by x^{2}, √2 by \sqrt{2}, ≤ by \leq."""
    if text.isascii() and "sqrt" not in text:
        return text
    text = _SUPERS.sub(lambda m: "^{" + m[0].translate(_SUPER) + "}", text)
    text = _SUBS.sub(lambda m: "_{" + m[0].translate(_SUB) + "}", text).translate(_TABLE)
    return _RADICAL.sub(lambda m: r"\sqrt" + (f"{{{inside}}}" if (inside := m[1] or m[2]) else ""), text)


# ---- LaTeX.

_FONTS = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:bf|it|rm|sf|tt|normal)|boldsymbol|bm|mbox|hbox|operatorname|underline"
    r"|emph|pmb|boxed|fbox)\*?\s*\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"
)
_COLOURS = re.compile(r"\\(?:text)?color\s*\{[^{}]*\}")
_SIZES = re.compile(
    r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|bf|rm|it|limits|nolimits"
    r"|mathstrut)(?![a-zA-Z])(?:\.(?=\s|\Z))?"
)
_DIGIT_GAPS = re.compile(r"(?<=\d)(?:\{,\}|,\\!\s*|\\[,!;: ]|~)(?=\d{3}(?!\d))|(?<=\d)\\!(?=\d)")
_GAPS = re.compile(r"(?<!\\)\\[,!;:> ]|~|\\q?quad(?![a-zA-Z])|\\hspace\*?\{[^{}]*\}|(?<!\\)\\(?=\s|\Z)")
_MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
_MONTH_OF = {month[:3]: month for month in _MONTHS.split("|")}
_COMMANDS = {
    "dfrac": r"\frac", "tfrac": r"\frac", "cfrac": r"\frac", "le": r"\leq ", "leqslant": r"\leq ", "ge": r"\geq ",
    "geqslant": r"\geq ", "lt": "<", "gt": ">", "ne": r"\neq ", "rightarrow": r"\to ", "longrightarrow": r"\to ",
    "prime": "'", "therefore": "", "langle": "(", "rangle": ")", "lbrace": r"\{", "rbrace": r"\}", "lbrack": "[",
    "rbrack": "]", "epsilon": r"\epsilon ", "varepsilon": r"\epsilon ", "varphi": r"\phi ", "pounds": "£",
    "textsterling": "£", "euro": "€", "texteuro": "€",
}  # fmt: skip
_ROW_HEIGHT = re.compile(r"\\\\\s*\[[^\]]*\]")
_ALIASES = [
    (re.compile(pattern, re.IGNORECASE if "answer" in pattern else 0), new)
    for pattern, new in [
        (r"\\(?:varnothing|empty)(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset "),
        (r"<=|=<", r"\\leq "),
        (r">=", r"\\geq "),
        (r"\\not\s*=|!=", r"\\neq "),
        (r"\\(?:degrees?|textdegree)(?![a-zA-Z])|\^\s*\{\s*\\circ\s*\}|\^\s*\\circ(?![a-zA-Z])", r"^\\circ "),
        (r"\\([a-zA-Z]+)", lambda m: _COMMANDS.get(m[1], m[0])),
        (r"\^\s*\{?('+)\}?", r"\1"),
        (r"(\\(?:begin|end))\s*\{[bB]matrix\}", r"\1{pmatrix}"),
        (r"\\begin\{(aligned|align\*?|gathered|split)\}([^&]*?)\\end\{\1\}", r"\2"),
        (
            r"\A\s*(?:the\s+)?(?:(?:final|correct|right|best)\s+)?(?:answer(?:\s+is)?|(?:option|choice)\s+is)\s*[:=]?\s+",
            "",
        ),
        (r"\A\*+(?=\S)|(?<=\S)\*+\Z", ""),
        (r"(?<=\d)\s*\([a-zA-Z]{3,}(?: [a-zA-Z]+){0,3}\)\Z", lambda m: m[0].replace("(", " ").replace(")", "")),
        (r"\\([%&#])", r"\1"),
        (r"(?<![a-zA-Z\\])(?:(?:minus|negative)\s+|-\s*)(?:infinity|infty|inf|oo)(?![a-zA-Z])", r"-\\infty "),
        (r"(?<![a-zA-Z\\])(?:positive\s+)?(?:[Ii]nfinity|infty|inf|oo)(?![a-zA-Z])", r"\\infty "),
        (r"\A(?:the\s+)?empty\s+set\Z", r"\\emptyset "),
        (r"\A(\d+(?:\.\d+)?)\s+to\s+(\d+(?:\.\d+)?)\Z", r"\1:\2"),  # a ratio
        (r"(?<=\d)\s*(?:\b[Rr]|with\s+remainder|remainder|rem\.?)\s*(?=\d+\Z)", " R "),
        (r"(?<![a-zA-Z\\])pi(?![a-zA-Z])", r"\\pi "),
        (r"(?<![a-zA-Z\\])exp\s*\(([^()]*)\)", r"e^{\1}"),
        (r"(?<![a-zA-Z\\])cbrt\s*\(([^()]*)\)", r"\\sqrt[3]{\1}"),
        (r"\AC\(\s*(\d+)\s*,\s*(\d+)\s*\)\Z", r"\\binom{\1}{\2}"),
        (r"\A(?:\{\}\s*)?(?:[\^_]\s*\{?\s*)?(\d+)\s*\}?\s*C\s*_?\s*\{?\s*(\d+)\s*\}?\Z", r"\\binom{\1}{\2}"),
        (r"\(?\s*\\?(?<![a-z])[pb]?mod(?![a-z])\s*\{?\s*(\d+)\s*\}?\s*\)?", r"\\mod \1"),
        (r"(?<=[)\]])\s*U\s*(?=[(\[])", r"\\cup "),
        (
            r"\A(?:\(\s*-\s*\\infty\s*,\s*\+?\s*\\infty\s*\)|(?:the\s+set\s+of\s+)?[Aa]ll\s+real(?:s|\s+numbers)?)\Z",
            r"\\mathbb{R}",
        ),
        (r"\\mathbb\s*R(?![a-zA-Z])", r"\\mathbb{R}"),
        (r"\A[(\[][^()\[\]]*;[^()\[\]]*[)\]]\Z", lambda m: re.sub(r"(?<=\d),(?=\d)", ".", m[0]).replace(";", ",")),
        (r"(?<=\d)\s*\\mu\s*m(?![a-zA-Z])", " um"),
        (r"\A(\d+)\s+(?:in|out\s+of)\s+(\d+)\Z", r"\1/\2"),
        (r"(?<=[\w)])\s+only\Z", ""),
        (r"(?<!\d)(\d{1,2})\s*o'clock", r"\1:00"),
        (rf"\A({'|'.join(_MONTH_OF)})t?\.?\s+(?=\d{{1,2}}\Z)", lambda m: _MONTH_OF[m[1]] + " "),
        (rf"(?<=\d\s)({'|'.join(_MONTH_OF)})t?\.?\Z", lambda m: _MONTH_OF[m[1]]),
        (r"(?<!\S)\*\*([^\s*][^*]*)\*\*(?!\S)", r"\1"),
        (rf"\A(\d{{1,2}})(?:st|nd|rd|th)?\s+(?:of\s+)?({_MONTHS})(?![a-z])", r"\2 \1"),
        (rf"\A({_MONTHS})\s+(\d{{1,2}})(?:st|nd|rd|th)(?![a-z])", r"\1 \2"),
        (r"\A((?:\\\$|[€£¥₹])\s*\d+(?:\.\d+)?)\s?[kK]\Z", r"\1 thousand"),
        (r"\A((?:\\\$|[€£¥₹])\s*\d+(?:\.\d+)?)\s?M\Z", r"\1 million"),
        (r"\A0b([01]+)\Z", r"\1_2"),
        (r"\A0x([\da-fA-F]+)\Z", lambda m: f"{m[1].upper()}_{{16}}"),
        (r"\A(?:Matrix\()?\[\s*(\[[^\[\]]*\](?:\s*,\s*\[[^\[\]]*\])*)\s*\]\)?\Z", lambda m: _matrix(m[1])),  # of Python
    ]
]
_DOLLAR = re.compile(r"(?:^|(?<=US)|(?<=US ))\$(?=\s?\d[^$]*\Z)")  # of money, not of a formula
_PLAINEST = re.compile(r"-?\d+(?:\.\d+)?")
_OPEN_ENDS = re.compile(r"^\]([^\[\]]*)(\[|\])$|^(\[)([^\[\]]*)\[$")  # ]0,1[


@functools.lru_cache(1 << 15)
def normal(text: str) -> str:
    r"""Returns an answer as plain LaTeX, without delimiters, fonts, sizes and gaps, with one spelling per symbol.

    Units, commas in numbers and case stay. Cached. E.g. `$\dfrac12$.` gives `\frac12`.
    """
    if _PLAINEST.fullmatch(text):
        return text
    text = in_latex(text).replace("\\$", "\x01")
    text = text.replace("\\(", " ").replace("\\)", " ") if "\\(" in text else text
    text = _ROW_HEIGHT.sub(r"\\\\", text)
    text = text.replace("\\[", " ").replace("\\]", " ") if "\\[" in text else text
    text = _DOLLAR.sub("\x01", text.strip()).replace("$", " ").replace("\x01", "\\$")
    if "\\" in text:
        text = _COLOURS.sub("", _DIGIT_GAPS.sub("", text))
        for _ in range(6):
            text, count = _FONTS.subn(_unwrapped, text)
            if not count:
                break
        text = _SIZES.sub("", text)
    for pattern, new in _ALIASES:
        text = pattern.sub(new, text)
    text = " ".join(_GAPS.sub(" ", text).split()).strip(" ;")
    text = text if text.endswith("..") else re.sub(r"[.,:]+$", "", text).strip()
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'`"
    if quoted or text[:1] == "{" and _closes(text) == len(text) - 1:
        text = text[1:-1].strip()
    if m := _OPEN_ENDS.match(text):
        text = f"({m[1]}{')' if m[2] == '[' else ']'}" if m[2] else f"[{m[4]})"
    return text


def _matrix(rows: str) -> str:
    cells = [row.replace(",", " & ") for row in re.findall(r"\[([^\[\]]*)\]", rows)]
    return r"\begin{pmatrix}" + r" \\ ".join(cells) + r"\end{pmatrix}"


def _unwrapped(m: re.Match) -> str:
    at = m.start()
    return (" " if at and (m.string[at - 1].isalnum() or m.string[at - 1] in ")}") else "") + m[1]


def _closes(text: str) -> int:
    """Returns the index of the first brace's closing partner, or -1."""
    depth = 0
    for i, c in enumerate(text):
        if c in "{}" and text[i - 1 : i] != "\\":
            depth += 1 if c == "{" else -1
            if not depth:
                return i
    return -1


def squeezed(text: str) -> str:
    """Removes white space (except between digits) and braces without meaning, for comparison as text."""
    text = re.sub(r"([_^])\{(\w)\}", r"\1\2", text)
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)
    return re.sub(r"(?<!\d)\s|\s(?!\d)", "", text)


# ---- Units.

_NAMES = """cm centimeter centimetre centimeters centimetres|mm millimeter millimetre millimeters millimetres
m meter metre meters metres|km kilometer kilometre kilometers kilometres kms|inch inches in|ft foot feet|yd yard yards
mile miles mi|kg kilogram kilograms kgs|g gram grams|mg milligram milligrams|oz ounce ounces|ton tons tonne tonnes
L l liter litre liters litres|mL ml milliliter millilitre milliliters millilitres|s sec secs second seconds
min mins minute minutes|h hr hrs hour hours|day days|week weeks|month months|year years yr yrs
usd dollar dollars USD \\$ US\\$ US-dollar|eur euro euros EUR €|gbp GBP £|jpy yen JPY ¥|inr rupee rupees INR ₹ Rs
cent cents ¢|deg degree degrees|degC Celsius|degF Fahrenheit|rad radian radians|mph|km/h kmph kph|gallon gallons gal
lb lbs|N newton newtons|J joule joules|W watt watts|V volt volts|Hz hertz|kJ|kW|MB|GB|kN|MW|mV|kV|kHz|MHz|GHz
nm nanometer nanometers nanometre nanometres|um micrometer micrometers micron microns|K kelvin kelvins
Pa pascal pascals|kPa|mol mole moles|atm|mA|ms millisecond milliseconds"""
_UNIT_OF = {alias: names.split()[0] for names in re.split(r"[|\n]", _NAMES) for alias in names.split()}
_PARTS = """m mm 1/1000 cm 1/100 km 1000 inch 0.0254 ft 0.3048 yd 0.9144 mile 1609.344 um 1e-6 nm 1e-9
g mg 1/1000 kg 1000
L mL 1/1000|lb oz 1/16|J kJ 1000|N kN 1000|W kW 1000 MW 1e6|V mV 1/1000 kV 1000
Hz kHz 1000 MHz 1e6 GHz 1e9|Pa kPa 1000
s ms 1/1000 min 60 h 3600 day 86400 week 604800|year month 1/12|m/s km/h 5/18 mph 0.44704|usd cent 1/100"""
_SIZE_OF: dict[str, tuple[str, Fraction]] = {}
for _base, *_others in map(str.split, re.split(r"[|\n]", _PARTS)):
    _SIZE_OF[_base] = _base, Fraction(1)
    _SIZE_OF |= {name: (_base, Fraction(size)) for name, size in zip(_others[::2], _others[1::2], strict=True)}
_COMPOUND = {"miles per hour": "mph", "mile/h": "mph", "km per h": "km/h", "km/h": "km/h"}
CHANGES = re.compile(
    r"(?:hundred|thousand|\w*illion|dozen|lakh|crore|pair|score|half|halve|third|quarter|(?!month|north"
    r"|south|depth|length"
    r"|width|earth|math|growth)\w+th|time|plu|minu|percent\w*|and|or|i|are|wa|were|be|not|no|none|never|wrong|incorrect"
    r"|false|true|correct|maybe|perhap|possibly|if|than|more|le|fewer|greater|over|under|above|below|mod|modulo|base"
    r"|squared|cubed|factorial|to|but|unle|except|negative|positive|north|south|east|west|am|pm|bc|ad|noon|midnight"
    r"|either|neither|between|from|cannot|can|isn|aren|only|fold|ths?|pi|sin|cos|tan|log|ln|where|for|with|x)s{0,2}\Z",
    re.IGNORECASE,
)
"""A word next to a number that changes its value or is not a unit, e.g. "thousand", "percent", "not"."""
_WORDY = re.compile(r"[^\W\d_]+(?:[ '&-]+[^\W\d_]+){0,5}\Z")
_NOUN = re.compile(r"[A-Z](?:[&-]| (?=[a-z]{3}))[^\W\d_]{2,}|[^\W\d_]+")
"""A word, or a name counted as one: M&Ms, T-shirts, C batteries."""
_POWER = re.compile(r"\s*(?:\^\s*\{?\s*([23])\s*\}?|(?<=[a-z])([23])\Z)")
_TAIL = re.compile(
    r"(?P<glued>\s*(?:\^\\circ\s*[CF]?|[€£¥₹¢]|\\\$))\Z"
    r"|(?P<gap>\s*)(?P<unit>[^\W\d_]{1,20}+\.?(?:\s*(?:\^\s*\{?[23]\}?|[ /·'&-]|\\cdot"
    r"|\bper\b)?\s*(?:[^\W\d_]++\.?|\([a-z ]+\)))"
    r"{0,6}\s*(?:\^\s*\{?-?[123]\}?)?)\.?\Z"
)


_PRODUCT = re.compile(
    r"(?<=[\d})])\s+(U(?:(?:\s*(?:/|\\cdot|\*)\s*|\s+)\(?U\)?)+)\Z".replace("U", r"[A-Za-z]+(?:\s*\^\s*\{?-?\d\}?)?")
)
"""Units multiplied and divided, e.g. N m^2/kg^2."""


def unit_of(phrase: str) -> str | None:
    """Returns the name of a unit, "" for another counted noun (e.g. "apples"), or None for other text (e.g. "is less").

    E.g. "m2" for "square metres", "mph" for "miles per hour", "usd" for "dollars".
    """
    phrase = phrase.strip().rstrip(".")
    power = ""
    if m := _POWER.search(phrase):
        power, phrase = m[1] or m[2], phrase[: m.start()] + phrase[m.end() :]
    if m := re.match(r"(?:square|sq\.?)\s+", phrase):
        power, phrase = "2", phrase[m.end() :]
    elif m := re.match(r"cu(?:bic|\.)?\s+", phrase):
        power, phrase = "3", phrase[m.end() :]
    if phrase.endswith((" squared", " cubed")):
        phrase, _, word = phrase.rpartition(" ")
        power = "2" if word == "squared" else "3"
    name = _UNIT_OF.get(phrase) or len(phrase) > 1 and _UNIT_OF.get(phrase.lower()) or _COMPOUND.get(phrase.lower())
    if name:
        return name + power
    parts = re.split(r"\s*/\s*|\s+per\s+", phrase)
    if len(parts) > 1:
        names = [unit_of(part) for part in parts]
        if None in names:
            return None
        joined = "/".join(map(str, names)) if all(names) else ""
        return _COMPOUND.get(joined, joined)
    words = _NOUN.findall(phrase)
    if _WORDY.match(phrase) and any(len(word) > 1 for word in words):
        words = [word for word in words if word.lower() not in ("a", "an")]
        if words and not any(CHANGES.match(word) or len(word) == 1 for word in words):
            return _UNIT_OF.get(words[0].lower(), "") + power if len(words) > 1 else ""
    return None


def size_of(unit: str) -> tuple[str, Fraction]:
    """Returns the base unit and the size in it, e.g. ("m2", 1/10000) for "cm2"; an unknown unit itself and 1.

    The unit's name must be from `unit_of`.
    """
    name, power = (unit[:-1], unit[-1]) if unit[-1:] in ("2", "3") else (unit, "")
    base, size = _SIZE_OF.get(name, (name, Fraction(1)))
    return base + power, size ** int(power or 1)


def _summed(text: str) -> Number | None:
    """Adds up a quantity given in several units, in the smallest: 1 hour 30 minutes is 90 minutes."""
    text = re.sub(r"\A\\\$\s*(\d+)(?=\D)", r"\1 dollars", text)
    if not _SEVERAL.fullmatch(text):
        return None
    parts = [(Fraction(value), unit_of(unit) or "") for value, unit in _QUANTITY.findall(text)]
    bases, sizes = zip(*(size_of(unit) for _, unit in parts), strict=True)
    if len(set(bases)) > 1 or "" in bases or sorted(sizes, reverse=True) != list(sizes) or len(set(sizes)) < len(sizes):
        return None
    total = sum(value * size for (value, _), size in zip(parts, sizes, strict=True))
    return Number(total / sizes[-1], False, False, parts[-1][1])


def without_unit(text: str) -> tuple[str, str]:
    """Splits a normal form into the text without unit or currency, and the unit name as `unit_of` gives it.

    The name is "" if there is no unit, or it is another noun, e.g. ("5", "") for "5 apples".
    """
    unit = ""
    if m := re.match(
        r"([-+]?)\s*(US\s?\\?\$|\\\$|[€£¥₹]|(?:USD|EUR|GBP|INR|JPY|Rs\.?)(?=\s*[\d.]))\s*(?=[-+]?[\d.\\(])", text
    ):
        unit = "usd" if "$" in m[2] else _UNIT_OF[m[2].strip(". ")]
        text = m[1] + text[m.end() :]
    if (
        ("/" in text or "^" in text)
        and (m := _PRODUCT.search(text))
        and all(part in _UNIT_OF for part in re.findall("[a-zA-Z]+", m[1].replace("\\cdot", "")))
    ):
        return text[: m.start()], unit or re.sub(r"[\s{}()]", "", m[1])
    tail = _TAIL.search(text, _last_value(text))
    if not tail or not tail.start():
        return text, unit
    if tail["glued"]:
        mark = tail["glued"].replace("\\circ", "").strip("^ ")
        named = "usd" if mark == "\\$" else _UNIT_OF.get(mark, "deg" + mark)
        return text[: tail.start()].rstrip(), unit or named
    name = unit_of(tail["unit"])
    if name is None or not tail["gap"] and not (name and len(re.match(r"\w*", tail["unit"])[0]) > 1):  # pyright: ignore
        return text, unit
    if text[tail.start() - 1 : tail.start()] not in "0123456789})]%" and not re.search(
        r"\\(?:pi|infty)\s*\Z", text[: tail.start()]
    ):
        return text, unit
    return text[: tail.start()].rstrip(), unit or name


def _last_value(text: str) -> int:
    """Returns the position after the last digit, bracket or pi outside an exponent; a unit may start there."""
    at = last = max(0, len(text) - 80)
    for m in re.finditer(r"\\pi(?![a-zA-Z])|\\sqrt|\^\s*\{?\s*-?[123]\s*\}?\s*\Z|[\d)\]}]", text[at:]):
        power = m[0].startswith("^") and re.search(r"[a-zA-Z]\s*\Z", text[: at + m.start()])
        if power and not re.search(r"(?<![a-zA-Z])(?<!\d )[a-zA-Z]\s*\Z|\\[a-zA-Z]+\s*\Z", text[: at + m.start()]):
            break
        last = at + m.end()
    return last


def clash(left: str, right: str) -> bool:
    """Returns whether two unit names are given ("" is absent) and differ.

    "deg" fits all that begin like it, e.g. "degC".
    """
    degrees = "deg" in (left, right) and left[:3] == right[:3]
    return bool(left and right and left != right and not degrees)


# ---- Numbers.

_GROUP = r"(?:,|\{,\}|,\\!\s?|\\[,!;: ]|[ ~'])"  # between thousands
NUMBER = re.compile(
    rf"([+-]?)\s?(?=\.?\d)(\d{{1,3}}(?:{_GROUP}\d{{3}})+(?!\d)|\d{{1,2}}(?:,\d{{2}})+,\d{{3}}(?!\d)|\d*)"
    r"((?:\.\d*)?(?:[eE][+-]?\d{1,3})?)"
)
"""A plain number: sign, integer digits, rest."""
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12, "lakh": 5, "crore": 7}
_SCALE = re.compile(r"\s+(hundred|thousand|million|billion|trillion|lakh|crore|dozen)s?(?=\s|\Z)", re.IGNORECASE)
_FILLER = re.compile(
    r"(?:(?:approximately|approx\.?|about|around|roughly|nearly|exactly|precisely|simply|just|only|indeed"
    r"|equals?|a total of"
    r"|in total|total of|therefore|thus|hence|so|then|namely|is|be|to be|the number|the value|the|it|it's|that is"
    r"|an?(?!\s+(?:half|third|quarter|f[io]\w+th|sixth|eighth|tenth))"
    r"|i\.e\.|precisely|equal to|given by|\\approx|\\thickapprox|\\simeq|\\sim|~|=|:)(?![a-zA-Z])[\s,:]*)+",
    re.IGNORECASE,
)
_FRACTION = re.compile(r"\\frac\s*(?:\{\s*(-?[\d,]+)\s*\}|(\d))\s*(?:\{\s*([\d,]+)\s*\}|(\d))|(-?\d+)\s*/\s*(-?\d+)")
_MIXED = re.compile(
    r"([+-]?)\s*(\d+)(?:\s+and\s+|\s*(?=\\)|\s+|-)(?:\\frac\s*(?:\{\s*(\d+)\s*\}"
    r"|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))|(\d+)\s*/\s*(\d+))")  # fmt: skip
_REPEATS = re.compile(
    r"([+-]?)(\d*)\.(\d*)(?:\\(?:overline|bar)\s*(?:\{(\d+)\}|(\d))"
    r"|\\dot\s*\{?(\d)\}?(?:(\d*)\\dot\s*\{?(\d)\}?)?|\((\d+)\))\Z"
)
_DOTS = re.compile(r"([+-]?)(\d*)\.(\d*?)(?:(\d)\4\4+|(\d{2,6})\5+)(?:\.\.\.|\\(?:ldots|dots|cdots))\Z")
_POWERS = re.compile(
    r"(?:([+-]?(?:\d+\.?\d*|\.\d+))\s*(?:\\times|\\cdot|\*|x)\s*)?([+-]?)(10)\s*(?:\^"
    r"|\*\*)\s*(?:\{\s*([+-]?\d{1,4})\s*\}|([+-]?\d{1,4}))\Z"
)
_EUROPEAN = re.compile(r"([+-]?)(\d{1,3}(?:\.\d{3})+),(\d{1,2})\Z")
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d{1,2}")  # of a quantity, 12,50 €: it has no thousands
_SIGN_WORD = re.compile(r"(?:minus|negative)\s+(?=[\d\\.])", re.IGNORECASE)
_PERCENT = re.compile(
    r"\s*(?:%|per\s?cent(?:ages?(?:\s+points?)?)?)(?:\s+of\s+(?:the\s+)?[a-z]{3,}(?:\s[a-z]+){0,3})?\Z", re.IGNORECASE
)
_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
    " eighteen nineteen"
)
_WORD_VALUE = {word: i for i, word in enumerate(_ONES.split())}
_WORD_VALUE |= {
    word: 10 * (i + 2) for i, word in enumerate("twenty thirty forty fifty sixty seventy eighty ninety".split())
}
_ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth".split()
_WORD_FRACTIONS = {"half": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "eighth": 8, "tenth": 10,
                   "halve": 2}  # fmt: skip
_HALVES = re.compile(r"\s+and\s+(?:a|one)[\s-]+(half|third|quarter)(?=\s|\Z)", re.IGNORECASE)


_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\.?")
_SEVERAL = re.compile(rf"{_QUANTITY.pattern}(?:\s*,?\s*(?:and\s+)?{_QUANTITY.pattern}){{1,3}}")


class Number(NamedTuple):
    """An everyday number: exact value, whether it is a decimal (maybe rounded), whether in percent, and its unit.

    The unit is a name as by `unit_of`, or "".
    """

    value: Fraction
    rounded: bool
    percent: bool
    unit: str


@functools.lru_cache(1 << 15)
def number_of(answer: str | float) -> Number | None:
    """Parses an answer as a number, exactly; None for other texts, inf and NaN, and exponents with four digits. Cached.

    The text is as written, also in words, e.g. "two dozen eggs". A percentage keeps its number: 18% has the value 18
    and `percent`.
    """
    if not isinstance(answer, str):
        finite = isinstance(answer, int) or math.isfinite(answer)
        return Number(Fraction(answer), isinstance(answer, float), False, "") if finite else None
    if len(answer) > LONGEST:
        return None
    text = normal(answer)
    text = _FILLER.sub("", text, count=1) if _FILLER.match(text) else text
    text = _SIGN_WORD.sub("-", text)
    if several := _summed(text):
        return several
    scale, percent, unit = Fraction(1), False, ""
    if (number := _plain(text)) is None:
        if not (m := _PERCENT.search(text)):
            text, unit = without_unit(text)
            m = _PERCENT.search(text)
        if m:
            percent, text = True, text[: m.start()]
        if (percent or unit) and _DECIMAL_COMMA.fullmatch(text):
            text = text.replace(",", ".")
        m = _HALVES.search(text)
        if m and (m.end() == len(text) or unit_of(text[m.end() :]) is not None):
            plain = _plain(text[: m.start()])
            base = plain[0] if plain else _in_words(text[: m.start()])
            half = Fraction(1, _WORD_FRACTIONS[m[1].lower()])
            return None if base is None else Number(base + half, False, False, unit)
        written = text
        while m := _SCALE.search(text):
            rest = text[m.end() :]
            if rest.strip() and not _SCALE.fullmatch(rest) and unit_of(rest) is None:
                break
            unit = unit or unit_of(rest) or ""
            scale *= 12 if m[1].lower() == "dozen" else 10 ** _SCALES[m[1].lower()]
            text = text[: m.start()] + (rest if _SCALE.fullmatch(rest) else "")
        number = _plain(text) if text else None
        if number is None and not percent:
            value, name = _in_words(written), ""
            if value is None and scale != 1 and (counted := _in_words(text)) is not None:  # two dozen
                return Number(counted * scale, False, False, unit)
            words = written.split(" ")
            for i in range(1, min(len(words), 9)):  # five apples
                if value is not None or written[:1].isdigit() or not written.isascii():
                    break
                name = unit_of(rest) if (rest := " ".join(words[-i:])).islower() else None
                value = _in_words(" ".join(words[:-i])) if name is not None else None
            return None if value is None else Number(value, False, False, unit or name or "")
    return number and Number(number[0] * scale, number[1], percent, unit)


def _ungrouped(m: re.Match[str]) -> str:
    """Removes the thousands separators of a plain number (`NUMBER`)."""
    return m[1] + re.sub(r"\D", "", m[2]) + m[3]


def _plain(text: str) -> tuple[Fraction, bool] | None:
    """Returns the value of a number without words, and whether it is a decimal."""
    text = text.strip()
    if text[:1] == "(" and text[-1:] == ")" and re.fullmatch(r"\(-?[\d./]+\)", text):
        text = text[1:-1]
    if m := NUMBER.fullmatch(text):
        return Fraction(decimal.Decimal(_ungrouped(m))), "." in m[3]
    if m := re.fullmatch(r"(\d+)(?:st|nd|rd|th)", text):
        return Fraction(m[1]), False
    if m := _EUROPEAN.fullmatch(text):
        return Fraction(f"{m[1]}{m[2].replace('.', '')}.{m[3]}"), True
    sign = -1 if text.startswith("-") else 1
    bare = text.lstrip("+-").lstrip() if text[:1] in "+-" and len(text) > 1 and text[1] not in "+-" else text
    if (m := _FRACTION.fullmatch(bare)) and not (bare is not text and "-" in m[0]):
        top, bottom = (int(part.replace(",", "")) for part in m.groups() if part)
        return (sign * Fraction(top, bottom), False) if bottom else None
    if m := _MIXED.fullmatch(text):
        whole, top, bottom = map(int, filter(None, m.groups()[1:]))
        return ((whole + Fraction(top, bottom)) * (-1 if m[1] == "-" else 1), False) if bottom else None
    if m := _REPEATS.fullmatch(text) or _DOTS.fullmatch(text):
        return _repeating(m[1], m[2], m[3], "".join(filter(None, m.groups()[3:]))), False
    if m := _POWERS.fullmatch(text):
        value = Fraction(m[1] or 1) * Fraction(10) ** int(m[4] or m[5])
        if m[1] and m[2]:
            return None
        return (-value if m[2] == "-" else value), bool(m[1] and "." in m[1])
    return None


def _repeating(sign: str, whole: str, fixed: str, cycle: str) -> Fraction:
    value = Fraction(f"{whole or 0}.{fixed or 0}") + Fraction(int(cycle), (10 ** len(cycle) - 1) * 10 ** len(fixed))
    return -value if sign == "-" else value


def _in_words(text: str) -> Fraction | None:
    """Reads a number in English words, e.g. 2/3 from "two thirds"; `None` if the text is no such number."""
    words = re.split(r"[\s-]+(?:and\s+)?", text.lower().removeprefix("minus ").removeprefix("negative "))
    sign = -1 if text.lower().startswith(("minus ", "negative ")) else 1
    part = words[-1].rstrip("s")
    if len(words) == 2 and part in _WORD_FRACTIONS and words[0] in {"a", "an", *_WORD_VALUE}:
        return Fraction(sign * _WORD_VALUE.get(words[0], 1), _WORD_FRACTIONS[part])
    if words == ["half"]:
        return Fraction(sign, 2)
    if words in (["dozen"], ["a", "dozen"]):
        return Fraction(sign * 12)
    if len(words) == 1 and words[0] in _ORDINALS:
        return Fraction(_ORDINALS.index(words[0]) + 1)
    total = part = 0
    for i, word in enumerate(words):
        if word in _WORD_VALUE:
            value = _WORD_VALUE[word]
            if i and (words[i - 1] in _WORD_VALUE) and not (_WORD_VALUE[words[i - 1]] >= 20 and 0 < value < 10):
                return None  # "two three" is no number
            part += value
        elif word == "hundred" and part:
            part *= 100
        elif word in ("thousand", "million", "billion") and part:
            total, part = total + part * 10 ** _SCALES[word], 0
        else:
            return None
    return Fraction(sign * (total + part))


def canonical_answer(answer: Any) -> str | float | None:
    r"""Returns a hashable form, equal for equal everyday answers; `None` if there is no answer.

    Numbers and plainly numeric strings ("1,000", "1\,000", "$18.0", "18 dollars", "€18") give an int or float by value,
    other strings their stripped text; booleans and infinities give their text, e.g. "True". A missing answer, a blank
    string and NaN count as no answer. Units are dropped, so "5 m" equals "5 km"; "1/2" and "18%" stay text, unequal to
    0.5 and 0.18 (`equivalent` compares these). A decimal that no float holds gives its text. Raises ValueError for
    other types, e.g. lists.
    """
    if answer is None or isinstance(answer, float) and math.isnan(answer):
        return None
    if isinstance(answer, bool) or isinstance(answer, float) and math.isinf(answer):
        return str(answer)
    if isinstance(answer, int | float):
        return answer  # 18 == 18.0, with one hash
    if not isinstance(answer, str):
        raise ValueError(f"an answer is a number, a string or null, not {answer!r}")
    text = answer.strip()
    bare = normal(text) if len(text) <= 2 * LONGEST else text
    if bare.lower() == "nan":
        return None
    number = NUMBER.fullmatch(bare) or NUMBER.fullmatch(without_unit(bare)[0])
    if not number:
        return text or None
    plain = _ungrouped(number)
    if len(plain) > LONGEST:
        return plain
    value = decimal.Decimal(plain)  # exact
    if value == value.to_integral_value():
        return int(value)
    lost = not float(value) or math.isinf(float(value))
    return str(value.normalize(_EXACT)) if lost else float(value)  # 1e-999 is no float
