"""Kinds of reasons that are none against a plan; any other text speaks against it."""

from __future__ import annotations


class Spared(str):
    """Why a plan was left out though nothing speaks against it: another as good, or the same with other settings, was in."""

    __slots__ = ()


class NotTried(str):
    """Why nothing is known of a plan."""

    __slots__ = ()


class Late(NotTried):
    """Nothing is known of a plan since the time was spent: a longer budget would tell."""

    __slots__ = ()
