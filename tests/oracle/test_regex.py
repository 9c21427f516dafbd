r"""Clients' regular expressions, compared with RE2/J, which evaluates them in Apache Kafka.

The expressions are random, or come from a table of the grammar. Both engines must accept the same
expressions, and an expression must match the same topic names and transactional ids.
``REGEXES=100000`` and ``SEED`` give more random expressions.
"""

# ruff: noqa: RUF001 - letters that look alike are part of what is tested

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from fencepost.logcore.machine import InvalidRegularExpressionError
from fencepost.logcore.regex import Regex
from fencepost.logcore.regex_syntax import MAX_PIECES

NAMES = (
    *("a", "b", "ab", "abc", "A", "AB", "k", "K", "s", "S", "1", "42", "_", "-", ".", "a.b", "a-b"),
    *(
        "a_b",
        "a1",
        "x-1.y_2",
        "orders",
        "Orders.EU",
        "team-07.orders",
        "aaa",
        "abab",
        "E",
        "Qa",
        "Z",
    ),
    *(
        "__consumer_offsets",
        "0",
        "7f",
        "DEAD-beef",
        "p",
        "pL",
        "e",
        "n" * 60,
        "ba",
        "bab",
        "c",
        "d",
    ),
)
"""Valid topic names, which contain ASCII characters only."""

_WORDS = "é É \u0101b αβγ Ωμέγα ς σ Σ ſ \u212a \u2126 Å Привет 日本 ß ẞ µ μ Μ ǆ ǅ ı İ ٣ \u0345"
IDS = (
    *_WORDS.split(),
    *(
        "aé",
        "éa",
        "\ue000",
        "\U0001f300",
        "\U00010400",
        "\U00010428",
        "\u2028",
        "\u00a0",
        "\n",
        "a b",
    ),
)
"""Transactional ids that are not valid topic names."""

JUDGE_S = 120.0
"""Timeout: RE2/J 1.8 loops for ever on (?i) with a large range, as in (?i)[\\x{100}-\\x{3000}]."""

BEYOND_ASCII = r"""
    é (?i)é (?i:É) [é] [^é] [à-ü] (?i)[à-ü] [^à-ü]+ . .. .*é (?s). (?i)ς (?i)σ (?i)Σ (?i)k (?i)s
    (?i)ſ (?i)[^k] (?i)[j-l] (?i)i (?i)ı (?i)İ (?i)ß (?i)µ (?i)ǅ (?i)Å [α-ω]+ (?i)[α-ω]+
    (?i)[Α-Ω]{3} \p{Greek}+ (?i)\p{Greek}+ \P{Greek} [\p{Greek}a]+ [^\p{Greek}] [\P{Greek}α]
    (?i)\p{Greek}*\pL \p{Cyrillic}+ \p{Han}+ \p{Latin}+ (?i)\p{Latin}+ \p{Common} (?i)\p{Common}
    \p{Inherited} (?i)\p{Inherited} \p{Unknown} \p{L}+ (?i)\p{L} \p{Lu} (?i)\p{Lu} \p{Ll} (?i)\p{Ll}
    \p{Lt} (?i)\p{Lt} \p{Lo} \p{Nd} \P{Nd} \p{Zl} \p{Zs} \p{C} \p{Co} \p{So} \p{Mn} (?i)\p{Mn}
    \p{Any} \P{Any} \w (?i)\w \W (?i)\W \D+ \S+ \s \S (?i)[[:alpha:]] (?i)[[:^alpha:]]
    [[:^ascii:]]+ (?i)[^\W] .*\b.* .*\bé é\b é\B aé\b a\bé \x{1f300} [\x{10000}-\x{10FFFF}]
    [\x{80}-\x{10FFFF}]+ [\x{7f}-\x{10FFFF}]+ [\x{81}-\x{10FFFF}] (?i)\x{10400} \Qé\E
    [\x00-\x{10FFFF}] [^\x00-\x{10FFFF}] (?i)[\x00-\x{10FFFF}] (?i)[é-ó]+ é*a? (?i)(é|σ)+ [éσk]
    (?i)[éσk] (?i)[^éσk]
"""

GRAMMAR = (
    *(
        "",
        "a",
        ".*",
        "a|b",
        "a||b",
        "|",
        "()",
        "(|)",
        "(a",
        "a)",
        ")",
        "(",
        "(?:",
        "(?:a)b",
        "((a)b)*",
    ),
    *(
        "*",
        "a|*",
        "(*)",
        "+a",
        "?",
        "a**",
        "a*+",
        "a+?",
        "a*?b",
        "a??",
        "a???",
        "^*a",
        "$*",
        r"\b*a",
    ),
    *(
        "a{2}",
        "a{2,}",
        "a{,2}",
        "a{2,1}",
        "a{0}",
        "a{0,0}b",
        "a{01}",
        "a{1000}",
        "a{1001}",
        "a{1,1001}",
    ),
    *("a{", "a{2", "a{2,", "a{a}", "{", "{2}", "a{99999999}", "a{999999999}", "a{2}{3}", "a{2}*"),
    *("(a{2}){3}", "(?:a{2}){0,3}b?", "a{2}?", "}", "]", "a]", "a}"),
    *(
        "^a$",
        "^^a$$",
        "a^b",
        "a$b",
        r"\Aa\z",
        r"a\Z",
        r"\Ba\B",
        r"\ba\b",
        r"a\.\bb",
        r".*\b\..*",
        r"\b",
    ),
    *(r"\B", r"(?m)^a$", r"(?m:^)a", "(?s).*", "(?s:.)", "(?-s).*", "(?i)AB", "(?i:A)b", "(?i:a)B"),
    *("a(?i)b", "a(?i)b|B", "(a(?i)b)B", "(?i)a(?-i)B", "(?i-s:A.)", "(?U)a+", "(?U:a+?)b", "(?)a"),
    *(
        "(?-)a",
        "(?i-)a",
        "(?--i)a",
        "(?x)a",
        "(?ii)A",
        "(?i",
        "(?P<n>a)",
        "(?<n>a)b",
        "(?P<n>a)(?P<n>b)",
    ),
    *(
        "(?P<n-m>a)",
        "(?P<>a)",
        "(?P<n",
        "(?P=n)",
        "(?P>n)",
        "(?'n'a)",
        "(?=a)",
        "(?!a)",
        "(?<=a)",
        "(?<!a)",
    ),
    *(
        "(?>a)",
        "(?#a)",
        "(?1)",
        r"\1",
        r"(a)\1",
        r"\01",
        r"\012",
        r"\141",
        r"\8",
        r"\0",
        r"[\1]",
        r"[\141]",
    ),
    *(
        r"\x61",
        r"\x{61}",
        r"\x{0061}b?",
        r"\x{10FFFF}|a",
        r"\x{110000}",
        r"\x",
        r"\x6",
        r"\x{}",
        r"\x{g}",
    ),
    *(
        r"\xzz",
        r"\x{61",
        r"\a",
        r"\f",
        r"\n",
        r"\r",
        r"\t",
        r"\v",
        r"\e",
        r"\c",
        r"\u0061",
        r"\N",
        r"\R",
    ),
    *(
        r"\C",
        r"\X",
        r"\G",
        r"\h",
        r"\K",
        r"\E",
        r"a\Eb",
        "\\",
        r"a\\",
        r"\_",
        r"\-",
        r"\.",
        r"\ ",
        "\\é",
    ),
    *(
        r"\Qa.b\E",
        r"\Qa.b",
        r"\Qa\E*",
        r"a\Q\E*",
        r"\Q\E*",
        r"\Q*\E+|a",
        r"\Q\\E|a",
        r"[\Qa\E]",
        "(?i)\\QAB\\E",
    ),
    *(
        r"\d+",
        r"\D+",
        r"\w+",
        r"\W+",
        r"\s",
        r"\S+",
        r"[\d]",
        r"[^\d]+",
        r"[\D]+",
        r"[^\D]",
        r"[\w.-]+",
    ),
    *(
        "[a]",
        "[^a]",
        "[]",
        "[]a]",
        "[^]a]+",
        "[^]",
        "[a-c]+",
        "[c-a]",
        "[a-]",
        "[-a]",
        "[a-b-c]+",
        "[--.]",
    ),
    *(
        "[a",
        "[",
        "[^",
        "[a-",
        r"[a-\d]",
        r"[\d-z]",
        r"[\b]",
        r"[\x61-\x63]+",
        r"[\]]",
        r"[\\]",
        "[[]a]",
    ),
    *(
        "[[:alpha:]]+",
        "[[:^alpha:]]+",
        "[^[:alpha:]]+",
        "[[:nope:]]",
        "[[:alpha]]",
        "[[:alpha:",
        "[[:]",
    ),
    *(
        "[:alpha:]+",
        "[[:lower:]]+",
        "(?i)[[:lower:]]+",
        "(?i)[[:^upper:]]+",
        "[[:^lower:][:digit:]]+",
    ),
    *(
        f"[[:{name}:]]+"
        for name in [
            "alnum",
            "ascii",
            "blank",
            "cntrl",
            "digit",
            "graph",
            "print",
            "punct",
            "space",
        ]
    ),
    *(f"[[:{name}:]]+" for name in ["upper", "word", "xdigit", "ALPHA"]),
    *(rf"\p{name}+" for name in "LNPSZCM"),
    *(
        rf"\p{{{name}}}+"
        for name in [
            "Lu",
            "Ll",
            "Lt",
            "Nd",
            "Nl",
            "Pc",
            "Pd",
            "Po",
            "Sm",
            "Zs",
            "Cc",
            "Cn",
            "LC",
            "Any",
            "ASCII",
            "L&",
            "IsGreek",
        ]
    ),
    *(
        rf"\p{{{name}}}*a?"
        for name in [
            "Greek",
            "Latin",
            "Common",
            "Han",
            "Unknown",
            "greek",
            "Yi",
            "Klingon",
            "Cyrillic",
        ]
    ),
    *(
        r"\PL+",
        r"\pL\pN*",
        r"\p{^L}+",
        r"\P{^L}+",
        r"\P{Greek}+",
        r"\p{^Greek}+",
        r"[\pL\d]+",
        r"[^\pL]+",
    ),
    *(
        r"\p",
        r"\p{",
        r"\p{}",
        r"\p{^}",
        r"\p^",
        r"\pX",
        r"[\p{Greek}a]+",
        r"[\P{Greek}]+",
        r"\p{L",
        r"\pé",
    ),
    *(
        r"(?i)\p{Lu}+",
        r"(?i)\p{Ll}+",
        r"(?i)\p{L}+",
        r"(?i)\P{Lu}+",
        r"(?i)\P{Ll}+",
        r"(?i)[\p{Ll}]+",
    ),
    *(r"(?i)\p{Greek}+a?", r"(?i)\W+", r"(?i)\w+", r"(?i)[^k]+", r"(?i)[a-k]+", r"(?i)[^A-C]+"),
    *(
        "é",
        "[é]|a",
        "[^é]+",
        "(?i)\u017f",
        "(?i)[\u017f]+",
        "(?i)\u212a",
        "(?i)[^\u212a]+",
        r"(?i)\x{17f}+",
    ),
    *(
        r"(?i)[\x{17e}-\x{180}]+",
        r"(?i)[\x{2129}-\x{212b}]+",
        "\u017f",
        "\u212a",
        "(?i)É|a",
        "a\nb",
        "[\n]|a",
        "(?m)a$\n^b|a",
        "日本|a",
    ),
    *("(" * 300 + "a" + ")" * 300, "|".join(f"^topic-{n}$" for n in range(300)) + "|^a$"),
    *(
        "a{3}|(?:ab){2}",
        "(a|b)*?c?",
        "(?:a|ab)(?:c|bcd)?",
        "(a*)*b",
        "(a?){30}a{3}",
        ".{60}",
        r".*\d{2}.*",
    ),
)
ATOMS = (
    *(
        "a",
        "b",
        "A",
        "k",
        "S",
        "1",
        "_",
        "-",
        r"\.",
        ".",
        "[ab]",
        "[^a]",
        "[a-k]",
        r"[\d_]",
        r"\w",
        r"\W",
    ),
    *(
        r"\d",
        r"\D",
        r"\pL",
        r"\PL",
        r"\p{Lu}",
        r"\p{Ll}",
        r"\P{Ll}",
        r"\p{Greek}",
        r"\p{^Latin}",
        r"\pN",
    ),
    *("[α-ω]", "é", r"\P{Greek}", "[^é]", r"[^\p{Cyrillic}a]", r"(?i:\p{Lu})"),
    *(
        "[[:alpha:]]",
        "[[:^punct:]]",
        r"[^\W-]",
        r"\x61",
        r"\x{17f}",
        "[\u212aa]",
        r"\Qab\E",
        r"\b",
        r"\B",
    ),
    *(
        "^",
        "$",
        r"\A",
        r"\z",
        "(?i)",
        "(?-i)",
        "(?s)",
        "(?m)",
        "(?U)",
        "{",
        "}",
        "]",
        r"\E",
        r"\Q",
        "\\",
    ),
    *("[", "(", ")", "|", "*", "?", "é", "(?x)", r"\p{Nope}", "[b-a]", "[]", "", "(?P<n>"),
)
SIGNS = ("", "", "", "*", "+", "?", "*?", "{2}", "{1,3}", "{0}", "{2,}", "{,2}", "{1001}")
FLAGS = ("(", "(?:", "(?i:", "(?-i:", "(?is-m:", "(?U:")


def some_regex(draw: random.Random, depth: int = 0) -> str:
    """Draw an expression, which is usually valid, and otherwise invalid in one place."""
    parts = []
    for _ in range(draw.randint(0, 4)):
        if depth < 3 and draw.random() < 0.3:
            part = draw.choice(FLAGS) + some_regex(draw, depth + 1) + ")"
        else:
            # The atoms at the end of the list are broken.
            most = len(ATOMS) if draw.random() < 0.05 else ATOMS.index("{")
            part = ATOMS[draw.randrange(most)]
        parts.append(part + draw.choice(SIGNS[: len(SIGNS) - (draw.random() < 0.97)]))
        if draw.random() < 0.15:
            parts.append("|")
    return "".join(parts)


@pytest.fixture(scope="module")
def re2j(java_tools: Path) -> Iterator[Path]:
    yield from java_tools.glob("re2j-*.jar")


def judged(re2j: Path, regexes: Sequence[str]) -> list[str]:
    """Return RE2/J's result for each expression: one digit for each name, or the error."""
    asked = (
        "\n".join(
            [
                " ".join(name.encode().hex() for name in (*NAMES, *IDS)),
                *(regex.encode().hex() for regex in regexes),
            ]
        )
        + "\n"
    )
    source = Path(__file__).with_name("RegexJudge.java")
    command = ["java", "-Xshare:auto", "-XX:TieredStopAtLevel=1", "-cp", str(re2j), str(source)]
    done = subprocess.run(
        command, input=asked, capture_output=True, text=True, check=True, timeout=JUDGE_S
    )
    return done.stdout.splitlines()


def ours(regex: str) -> str:
    found = Regex(regex)
    try:
        return "".join("01"[found.matches(name)] for name in (*NAMES, *IDS))
    except InvalidRegularExpressionError as error:
        return f"refused: {error}"


def differences(re2j: Path, regexes: Sequence[str]) -> list[tuple[str, str, str]]:
    theirs = judged(re2j, regexes)
    assert len(theirs) == len(regexes)
    found = []
    for regex, judgement in zip(regexes, theirs, strict=True):
        mine = ours(regex)
        is_same = mine == judgement if judgement[:1] in "01" else mine.startswith("refused")
        if not is_same:
            found.append((regex, mine, judgement))
    return found


def test_regex_grammar_equals_re2js(re2j: Path) -> None:
    assert differences(re2j, (*GRAMMAR, *BEYOND_ASCII.split())) == []


def test_random_regex_matches_what_re2j_matches(re2j: Path) -> None:
    seed = int(os.environ.get("SEED", "0")) or random.randrange(1 << 32)
    draw = random.Random(seed)
    regexes = [some_regex(draw) for _ in range(int(os.environ.get("REGEXES", "20000")))]
    found = differences(re2j, regexes)
    assert found == [], f"SEED={seed}"
    taken = sum(ours(regex)[:1] in "01" for regex in regexes[:1_000])
    assert 300 < taken < 1_000, "too few expressions can be used, or none is broken"


def test_only_large_counted_repetitions_are_refused(re2j: Path) -> None:
    """Test both sides of the limit, which RE2/J lacks, and the longest expression of a request."""
    longest = 32_767
    fits = ("(?:a{1000}){64}", "a" * longest, "|" * longest, "a*" * (longest // 2))
    assert all(not ours(regex).startswith("refused") for regex in fits)
    assert ours("(?:a{1000}){66}").startswith("refused")
    assert str(MAX_PIECES) in ours("(?:a{1000}){66}")
    assert judged(re2j, ["(?:a{1000}){66}"])[0].startswith("0")
