"""The tokenizer of a checkpoint."""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from piccard_contract.errors import ErrorCode, RequestError

from deepseek_engine.text.chat_template import ChatTemplate
from deepseek_engine.text.errors import TokenizerError
from deepseek_engine.text.longest_token import longest_token
from deepseek_engine.text.token_bytes import TokenBytes
from deepseek_engine.text.tokenizer_files import TokenizerFiles, read_tokenizer_files


class Tokenizer:
    """Text to token ids and back; safe to share between threads.

    Args:
        core: the tokenizer of tokenizer.json.
        files: what the files beside it say.
        digest: sha256, in hex, of tokenizer.json.

    Attributes:
        bos_token_id: put before a text, or None.
        eos_token_id: the checkpoint's own end of text, or None.
        eos_token_ids: every id that ends a text: those of generation_config.json (or config.json) and `eos_token_id`.
        add_bos_token: whether `encode` puts bos before a text.
        vocab_size: one more than the largest id; a model's may be padded beyond it.
        special_ids: ids that `skip_special_tokens` hides.
        chat_template: the checkpoint's templates; false where there are none.

    Raises:
        TokenizerError: the files contradict each other, or the decoder cannot be streamed.
    """

    def __init__(self, core: tokenizers.Tokenizer, files: TokenizerFiles, digest: str) -> None:
        # Some checkpoints leave the settings of a training run in tokenizer.json.
        core.no_truncation()
        core.no_padding()
        self._core = core
        self._digest = digest
        self.bos_token_id = self._id_of(files, "bos_token", files.bos_token_id)
        own_eos = self._id_of(files, "eos_token", files.eos_token_ids[0] if files.eos_token_ids else None)
        self.eos_token_id = own_eos
        self.eos_token_ids = tuple(dict.fromkeys([*([] if own_eos is None else [own_eos]), *files.eos_token_ids]))
        self._mark_special(files)
        self.special_ids = frozenset(
            token_id for token_id, token in core.get_added_tokens_decoder().items() if token.special
        )
        self.vocab_size = max(core.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.add_bos_token = self._adds_bos(files)
        self.chat_template = ChatTemplate(files.chat_templates, files.special_tokens)
        self._longest_token = longest_token(core)
        self._all_bytes = TokenBytes(core)
        self._ordinary_bytes = TokenBytes(core, hidden=self.special_ids)

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Load tokenizer.json and what stands beside it from a checkpoint's folder.

        Raises:
            TokenizerError: a file is missing or damaged.
        """
        path = Path(folder) / "tokenizer.json"
        try:
            data = path.read_bytes()
        except OSError as error:
            raise TokenizerError(
                f"{path} cannot be read ({error.strerror}); a checkpoint needs its tokenizer.json"
            ) from error
        try:
            core = tokenizers.Tokenizer.from_buffer(data)
        # The library raises plain Exception for whatever it cannot parse.
        except Exception as error:
            raise TokenizerError(f"{path} is not a tokenizer ({error}); copy it from the checkpoint again") from error
        return cls(core, read_tokenizer_files(Path(folder)), hashlib.sha256(data).hexdigest())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        With `add_special_tokens` bos is put first where the checkpoint wants one and the text does not begin with it;
        special tokens written in the text are taken as such.

        Raises:
            RequestError: INVALID_ENCODING for a text with lone surrogates.
        """
        try:
            ids = self._core.encode(text, add_special_tokens=False).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(
                ErrorCode.INVALID_ENCODING, "The text holds a lone surrogate, which UTF-8 cannot carry; remove it."
            ) from error
        if add_special_tokens and self.add_bos_token and self.bos_token_id is not None:
            return ids if ids[:1] == [self.bos_token_id] else [self.bos_token_id, *ids]
        return ids

    def fewest_tokens(self, text: str) -> int:
        """A number of tokens that `text` has at least, told without encoding it; 0 where none can be told."""
        return 0 if self._longest_token is None else -(-len(text.encode(errors="replace")) // self._longest_token)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids, with replacement characters where they are not UTF-8."""
        return self._core.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(self, messages: Any, *, add_generation_prompt: bool = True, **variables: Any) -> list[int]:
        """Token ids of a chat; the template writes its own bos. Raises as `ChatTemplate.render` does."""
        prompt = self.chat_template.render(messages, add_generation_prompt=add_generation_prompt, **variables)
        return self.encode(prompt, add_special_tokens=False)

    def check_ids(self, ids: Iterable[Any], vocab_size: int | None = None) -> list[int]:
        """The ids as a list, if all are in a vocabulary.

        Args:
            ids: token ids from a client.
            vocab_size: the model's vocabulary; this tokenizer's where it is None.

        Raises:
            RequestError: INVALID_VALUE for what is not an integer, INVALID_TOKEN for an id that is not there.
        """
        size = self.vocab_size if vocab_size is None else vocab_size
        checked = list(ids)
        for position, token_id in enumerate(checked):
            if type(token_id) is not int:
                raise RequestError(ErrorCode.INVALID_VALUE, f"token {position} is {token_id!r}; send integers")
            if not 0 <= token_id < size:
                raise RequestError(
                    ErrorCode.INVALID_TOKEN,
                    f"token id {token_id} (at {position}) is not in the vocabulary; send ids of 0 to {size - 1}",
                )
        return checked

    def token_text(self, token_id: int) -> str:
        """Text that one token adds after others, special tokens included; for log-probabilities."""
        return self._all_bytes[token_id].decode("utf-8", errors="replace")

    def token_bytes(self, *, skip_special_tokens: bool = True) -> TokenBytes:
        """The bytes that each token adds to a text."""
        return self._ordinary_bytes if skip_special_tokens else self._all_bytes

    def hash(self) -> str:
        """sha256, in hex, of tokenizer.json; equal hashes mean equal ids."""
        return self._digest

    def template_hash(self) -> str:
        """sha256, in hex, of the chat templates and the special tokens that they write."""
        return self.chat_template.hash()

    def _id_of(self, files: TokenizerFiles, name: str, otherwise: int | None) -> int | None:
        text = files.special_tokens.get(name)
        if text is None:
            return otherwise
        token_id = self._core.token_to_id(text)
        if token_id is None:
            raise TokenizerError(f"{name} {text!r} of tokenizer_config.json is not in tokenizer.json; copy both again")
        return token_id

    def _mark_special(self, files: TokenizerFiles) -> None:
        """Make the named special tokens special where tokenizer.json does not say so; the vocabulary stays as it is."""
        special = {token.content for token in self._core.get_added_tokens_decoder().values() if token.special}
        named = {*files.special_tokens.values(), *files.extra_special_tokens} - special
        self._core.add_special_tokens([text for text in sorted(named) if self._core.token_to_id(text) is not None])

    def _adds_bos(self, files: TokenizerFiles) -> bool:
        if self.bos_token_id is None:
            return False
        if files.add_bos_token is not None:
            return files.add_bos_token
        # That class adds bos unless it is told otherwise; for every other one tokenizer.json decides.
        if files.tokenizer_class in ("LlamaTokenizer", "LlamaTokenizerFast"):
            return True
        return self._core.encode("", add_special_tokens=True).ids[:1] == [self.bos_token_id]
