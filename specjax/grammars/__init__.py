"""Grammars that constrain a text: JSON schemas, regular expressions, choices and Lark grammars.

The distribution of a constrained row. At each position let A be the legal tokens for the text so
far. They are those of llguidance's mask: if the grammar forces the next bytes, A has only their
canonical token. The target's distribution p is truncated first (top-k, top-p, min-p), as without a
grammar. If any of the tokens that truncation keeps is legal, the next token is drawn from p
restricted to the tokens that are both kept and legal. If none is, it is drawn from p restricted to
A, which is truncated afterwards. Greedy rows take the likeliest token of A.

So each position is constrained by itself, as constrained decoding does everywhere. The text is not
distributed as p given that the whole text is valid. Other engines apply the mask before truncation.
Without truncation both are the same. With it, the order here has a property that drafts need: with
coupled sampling, and in greedy rows, a token that is drawn without the grammar and is legal is the
token that would be drawn with it.

The arithmetic is in `specjax.sampling`; `specjax.decoding.constrained` has the steps.
"""

from specjax.grammars.checker import CheckerBusyError, GrammarChecker, GrammarLimits
from specjax.grammars.compiler import CompiledGrammar, GrammarCompiler
from specjax.grammars.grammar import Choice, Grammar, JsonObject, JsonSchema, Lark, Regex
from specjax.grammars.matcher import Matcher
from specjax.grammars.tags import After, StructuralTag
from specjax.grammars.thoughts import BudgetMatcher, ThinkingBudget, ThoughtTokens

__all__ = [
    "After",
    "BudgetMatcher",
    "CheckerBusyError",
    "Choice",
    "CompiledGrammar",
    "Grammar",
    "GrammarChecker",
    "GrammarCompiler",
    "GrammarLimits",
    "JsonObject",
    "JsonSchema",
    "Lark",
    "Matcher",
    "Regex",
    "StructuralTag",
    "ThinkingBudget",
    "ThoughtTokens",
]
