"""Bodies of requests for vectors and scores of prompts, and their translation to completions of one token."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from jpaged.core.params import MAX_TOP
from jpaged.serving.fields import Items, Strict
from jpaged.serving.protocol import MAX_PROMPTS, CompletionRequest
from jpaged.serving.translated import Translated

Texts = Annotated[Items[str], Field(max_length=MAX_PROMPTS)]
ManyTokenIds = Annotated[Items[Items[int]], Field(max_length=MAX_PROMPTS)]


class FirstToken(Translated, CompletionRequest):
    """Completion whose only token is not returned."""


class EmbeddingsCompletion(FirstToken):
    """Completion that stands for a request for vectors."""

    original_names: ClassVar = {"prompt": "input"}


class ScoresCompletion(FirstToken):
    """Completion that stands for a request for scores."""

    original_names: ClassVar = {"prompt": "items", "logprob_token_ids": "label_token_ids"}


class PromptsRequest(Strict):
    """Common fields of the bodies, which completions have, too."""

    model: str | None = None
    user: str | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = Field(default=None, min_length=1, description="a non-empty text")
    priority: int | None = None
    request_id: str | None = None

    def _first_token(self, kind: type[FirstToken], **fields: Any) -> FirstToken:
        common = {name: getattr(self, name) for name in PromptsRequest.model_fields}
        return kind.of(common | {"max_tokens": 1, "temperature": 0, "min_tokens": 0, "stop": []} | fields)


class EmbeddingsRequest(PromptsRequest):
    """Body of `/v1/embeddings`.

    Attributes:
        dimensions: number of dimensions to keep of each vector, for models whose training allows this.
        pooling: the hidden state of the last token, or the mean of those of all tokens.
        use_activation: whether vectors have length 1.
    """

    text_field: ClassVar = "input"

    input: str | Texts | Items[int] | ManyTokenIds = Field(description="a text, token ids, or a list of either")
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, ge=1, description="a number of at least 1")
    pooling: Literal["last", "mean"] = "last"
    use_activation: bool = True
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None

    @property
    def text_length(self) -> int:
        """Number of characters of the longest text."""
        texts = [self.input] if isinstance(self.input, str) else self.input
        return max((len(text) for text in texts if isinstance(text, str)), default=0)

    def completion(self) -> FirstToken:
        """Return the request of the first token behind each prompt."""
        names = ("truncate_prompt_tokens", "truncation_side")
        cuts = {name: getattr(self, name) for name in names}
        return self._first_token(EmbeddingsCompletion, prompt=self.input, **cuts)


class ScoreRequest(PromptsRequest):
    """Body of `/v1/score` as SGLang has it: the probabilities of some tokens behind a query and each item.

    Attributes:
        apply_softmax: whether the probabilities of the labels add up to 1.
        item_first: whether the item comes before the query.
    """

    text_field: ClassVar = "items"

    query: str | Items[int] = Field(description="a text or token ids")
    items: str | Texts | ManyTokenIds = Field(description="a text, or a list of texts or of token ids")
    label_token_ids: Items[int] = Field(min_length=1, max_length=MAX_TOP, description=f"1 to {MAX_TOP} token ids")
    apply_softmax: bool = False
    item_first: bool = False

    @property
    def text_length(self) -> int:
        """Number of characters of the longest prompt."""
        texts = [self.items] if isinstance(self.items, str) else self.items
        longest = max((len(text) for text in texts if isinstance(text, str)), default=0)
        return longest + (len(self.query) if isinstance(self.query, str) else 0)

    def completion(self, prompts: list[list[int]]) -> FirstToken:
        """Return the request of the first token behind each prompt."""
        labels = self.label_token_ids
        return self._first_token(ScoresCompletion, prompt=prompts, logprobs=0, logprob_token_ids=labels)


class GenerativeScoringRequest(ScoreRequest):
    """Body of `/generative_scoring` as vLLM has it."""

    apply_softmax: bool = True
