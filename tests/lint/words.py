"""Find phrases that readers must read twice, in comments, strings and pages.

``rules.py`` runs this check with its own.  In C and Python it reads comments and
strings, in all other files the whole text.  It skips fenced blocks and `code`.
To allow a phrase, write `lint: words - ` and the reason on its line.
"""

import re
import tokenize
from collections.abc import Iterator

FILES = """csrc/**/*.[ch] csrc/**/*.cu python/**/*.py* setup.py *.md docs/*.md
    tests/**/*.md notebooks/*.* docker/* requirements/* .ci/run Dockerfile Makefile"""

_END = r"(?=[.,;:)]| (?:are|for|has|have|in|is|may|on|that|to|was|which)\b)"
PHRASES = (
    r"nobody|somebody|someone|whom|whoever|there where|for ever|as ever",
    r"(?<!users )(?<!user )(?<!people )(?<!anyone )who(?! ?[:)])",
    r"aught|hereof|lest|thereof|therein|whereby|wherein|whereof",
    r"(?<!there )(?:is|are|was|were|be|being) (?-i:none)|none's|be it that",
    r"where there (?:is|are|was|were)|for good(?! reason)|still at it",
    r"(?<!most )(?<!all )(?<!some )(?<!each )(?<!one )(?<!both )of which",
    r"one's|(?:is|are|of) no [a-z]+'s|(?:is another|are others)(?=[.,;:)])",
    r"(?<!place )(?<!instead )of (?:(?:the|a|an) )?[a-z0-9.]+'s" + _END,
    r"of (?:its|their|our|his) own" + _END,
    r"(?:come|comes|came|coming) to (?:its|their|an) (?:own )?end",
    r"(?:is|are|was|were) (?:not )?to be|in the moment in which|in such a way that",
    r"(?:it|that|there|they|what|which) (?:is|are|was|were) (?:not )?to "
    r"(?!(?:an?|each|its|the|their)\b)[a-z]+",
)
PATTERN = re.compile(rf"\b(?:{'|'.join(PHRASES)})\b".replace(" ", r"\s"), re.IGNORECASE)
C_WORDS = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|' + r"'(?:\\.|[^'\\\n])*'"


def spans(path: str, text: str) -> Iterator[tuple[int, int]]:
    """Yield the begin and end of each comment and string, or of the whole text."""
    if path.endswith((".c", ".h", ".cu")):
        yield from (m.span() for m in re.finditer(C_WORDS, text, re.DOTALL))
    elif path.endswith((".py", ".pyi")):
        lines = text.splitlines(keepends=True)
        starts = [0]
        for line in lines:
            starts.append(starts[-1] + len(line))
        for token in tokenize.generate_tokens(iter(lines).__next__):
            if re.search("COMMENT|STRING", tokenize.tok_name[token.type]):
                (row, column), (last, end) = token.start, token.end
                yield starts[row - 1] + column, starts[last - 1] + end
    else:
        yield 0, len(text)


def check(path: str, text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the rule and the words of each phrase in a file."""
    words, at = "", 0
    for begin, end in spans(path, text):
        part = text[begin:end]
        if " " not in part or begin < at:  # a name, not a sentence
            continue
        words += re.sub(r"\S", "\0", text[at:begin]) + part
        at = end
    code = r"(?ms)^ *```.*?^ *```$|`+[^`\n]*\n?[^`\n]*`+|\{[^{}\n]*\}"
    words = re.sub(code, lambda match: re.sub(r"\S", "\0", match[0]), words)
    # Drop the marks at both ends of a line: a phrase may span two lines.
    words = re.sub(r'(?m)^[ *#"/]+|(?:\\n)?[" ]*,?$|(?<= ) +', "", words)
    for match in PATTERN.finditer(words):
        line = words.count("\n", 0, match.start()) + 1
        yield line, "words", repr(" ".join(match[0].split()))
