"""Masks secrets in command lines and environments for records, by the names of options and variables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

MASK = "***"
# the last part of a name: HF_TOKEN, --api-key, wandb.api_key, AWS_SECRET_ACCESS_KEY
_SECRET = re.compile(
    r"(?:^|_)(?:token|password|passwd|passphrase|secret|credentials?|apikey|authtoken"
    r"|(?:access|account|api|app|auth|encryption|license|private|secret|signing|storage)_?key)$|(?:^|_)pass$|_pwd$"
)
# tokens of a language model's vocabulary
_VOCABULARY = re.compile(r"(?:^|_)(?:bos|cls|eos|image|mask|pad|sep|special|unk)_token$")
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")
_ASSIGNED = re.compile(r"([-+]*[A-Za-z_][\w.+-]*)=(.*)", re.DOTALL)
_VALUE = r"(?:\"[^\"]*\"|'[^']*'|[^\s;&|<>()\"']+)"
_ASSIGNED_IN_TEXT = re.compile(rf"(?<![\w.+-])([-+]*[A-Za-z_][\w.+-]*)(=){_VALUE}")
_GIVEN_IN_TEXT = re.compile(rf"(?<![\w.+-])(--?[A-Za-z][\w.-]*)([ \t]+)(?!--){_VALUE}")
_URL = re.compile(r"([A-Za-z][\w+.-]*://[^\s/:@]*:)[^\s/@]+@")
# a token in place of a name, alone or with a password that says nothing
_URL_NAME = re.compile(r"\b((?:[\w.-]+\+)?https?://)[^\s/:@]+(?::(?:x-oauth-basic)?)?@", re.IGNORECASE)
_URL_TOKEN = re.compile(r"(://[^\s#]*#)[\w-]{32,}")  # as that of `ringtap live --web`

# headers of HTTP, in which the kind of the proof stays
_HEADERS = ("authorization", "proxy-authorization")
_SCHEMES = ("bearer", "basic", "digest", "token", "apikey")
_HEADER = re.compile(
    rf"(?<![\w-])([A-Za-z][\w-]*)(\s*:\s*(?:(?:{'|'.join(_SCHEMES)})\s+)?)[^\s\"';&|<>()]+", re.IGNORECASE
)
_COOKIE = re.compile(r"\b(cookie\s*:\s*)[^\"'\r\n]+", re.IGNORECASE)
_BEARER = re.compile(r"\b(bearer\s+)(?!\*)[\w.~+/=-]{8,}", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """Return True if an option or variable of this name holds a secret."""
    last = name.lstrip("-+").rpartition(".")[2]
    plain = _CAMEL.sub("_", last).lower().replace("-", "_")
    return bool(_SECRET.search(plain)) and not _VOCABULARY.search(plain)


def mask_words(words: Sequence[str]) -> list[str]:
    """Return a command line with the values of secret options and variables as ``***``."""
    masked, follows = [], False
    for word in words:
        if follows and word.lower() in _SCHEMES:
            masked.append(word)
            continue
        if follows and not word.startswith("--"):
            masked.append(MASK)
            follows = False
            continue
        follows = word.lower() == "bearer" or (word.lower().rstrip(": ") in _HEADERS and word.endswith(":"))
        follows |= word.startswith("-") and "=" not in word and is_secret(word)
        assigned = _ASSIGNED.fullmatch(word)
        if assigned and is_secret(assigned[1]):
            masked.append(f"{assigned[1]}={MASK}")
        else:
            masked.append(mask_text(word))
    return masked


def mask_text(text: str) -> str:
    """Return a text that may hold command lines, as a shell's ``-c`` does, with their secrets as ``***``."""

    def mask(found: re.Match[str]) -> str:
        return f"{found[1]}{found[2]}{MASK}" if is_secret(found[1]) else found[0]

    def mask_header(found: re.Match[str]) -> str:
        is_one = found[1].lower() in _HEADERS or is_secret(found[1])
        return f"{found[1]}{found[2]}{MASK}" if is_one else found[0]

    text = _URL_NAME.sub(rf"\1{MASK}@", _URL_TOKEN.sub(rf"\1{MASK}", text))
    text = _HEADER.sub(mask_header, _COOKIE.sub(rf"\1{MASK}", text))
    text = _BEARER.sub(rf"\1{MASK}", text)
    return _URL.sub(rf"\1{MASK}@", _GIVEN_IN_TEXT.sub(mask, _ASSIGNED_IN_TEXT.sub(mask, text)))


def mask_variables(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return an environment with the values of secret variables as ``***``."""
    return {
        name: MASK if is_secret(name) else mask_text(value) if isinstance(value, str) else value
        for name, value in variables.items()
    }
