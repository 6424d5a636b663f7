"""Compilation of the grammars of requests, in a thread, with a deadline and a cache. Imports no torch."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from etude.errors import EngineError
from etude.grammars import Compiler, GrammarError, Matcher
from etude.inference.errors import EngineBusy, InvalidGrammar
from etude.records.completion import CompletionRequest

MAX_COMPILED = 32  # grammars kept; the least recently used is dropped
MAX_WAITING = 256  # requests that wait for their grammar; one more is refused
COMPILE_S = 20.0  # longest wait for a grammar, and for the tokeniser before the first one


class CompiledGrammars:
    """The compiled grammars of an engine, in a cache. `matcher` must always be called from the same event loop.

    `tokenizer` is the tokenizer.json of the checkpoint; None: the engine has none, and refuses every grammar.
    """

    def __init__(self, name: str, tokenizer: Path | None, *, vocab_size: int) -> None:
        self.name, self.tokenizer, self.vocab_size = name, tokenizer, vocab_size
        self._compiler: Compiler | None = None
        self._compiled: OrderedDict[str, Matcher] = OrderedDict()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"{name}-grammars")  # starts when used
        self._num_waiting, self._closed = 0, False

    async def matcher(self, request: CompletionRequest) -> Matcher | None:
        """Return a matcher of the request's grammar before its first token, or None for a request without a grammar.

        Raises `InvalidGrammar`, and `EngineBusy` when too many requests wait for a compilation."""
        grammar = request.sampling.grammar
        if not grammar:
            return None
        if self._num_waiting >= MAX_WAITING:
            facts = f"{self._num_waiting} requests wait for their grammars"
            raise EngineBusy(f"{self.name} compiles no more grammars", facts, hint="try again a little later")
        if self._closed:
            raise self._closing()
        self._num_waiting += 1
        wait_s = min(COMPILE_S, request.deadline_s)
        try:
            work = asyncio.get_running_loop().run_in_executor(self._thread, self._compile, grammar)
            return (await asyncio.wait_for(work, wait_s)).copy()
        except GrammarError as error:
            raise InvalidGrammar(f"request {request.request_id}: {error.what}", error.facts, hint=error.hint) from None
        except asyncio.CancelledError:
            if self._closed:
                raise self._closing() from None
            raise
        except TimeoutError:
            what = f"the grammar of request {request.request_id} was not compiled within {wait_s:g} s"
            raise InvalidGrammar(what, f"{len(grammar)} characters", hint="simplify the grammar") from None
        finally:
            self._num_waiting -= 1

    def _compile(self, grammar: str) -> Matcher:
        """Runs on the thread, which alone uses the compiler and the cache."""
        if (found := self._compiled.get(grammar)) is not None:
            self._compiled.move_to_end(grammar)
            return found
        if self.tokenizer is None:
            hint = "start the engine with --checkpoint, whose folder has tokenizer.json"
            raise GrammarError("this engine takes no grammars", f"{self.name} has no tokeniser", hint=hint)
        if self._compiler is None:
            self._compiler = Compiler(self.tokenizer, self.vocab_size)
        found = self._compiled[grammar] = self._compiler.compile(grammar)
        while len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)
        return found

    def _closing(self) -> EngineError:
        return EngineError(f"{self.name} is closing", hint="send the request to another engine")

    def close(self) -> None:
        """Stop the thread after its current compilation. Requests that wait for another one fail. Idempotent."""
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)
