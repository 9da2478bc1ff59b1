"""Continuations of earlier occurrences of a text's last tokens, and the share of each."""

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class Continuations:
    """The tokens that followed some occurrences of each row's last tokens.

    The occurrences of a group have the same context: so many of the row's last tokens stood before
    them. Groups with longer contexts come first.

    Attributes:
        tokens: ``[B, G, K, D]`` int32, the D tokens after each of K occurrences in each of G
            groups; -1 from the end of their text on, and all -1 for occurrences that do not exist.
        contexts: ``[B, G]`` int32, the number of tokens in the context of each group.

    Examples:
        >>> from specjax.drafters.continuations import Continuations
        >>> tokens = jnp.array([[[[7, 1], [7, 2], [8, 3]], [[9, 1], [-1, -1], [-1, -1]]]])
        >>> after = Continuations(tokens, contexts=jnp.array([[4, 2]]))
        >>> following, shares = after.next_tokens(after.all_members(), depth=0)
        >>> following[0, 0].tolist()
        [7, -1, 8, 9, -1, -1]
        >>> [round(share, 3) for share in shares[0, 0].tolist()]  # 8/13, 4/13, 2/3 of 1/13
        [0.615, 0.0, 0.308, 0.051, 0.0, 0.0]
    """

    tokens: jax.Array
    contexts: jax.Array

    @classmethod
    def joined(cls, groups: list["Continuations"]) -> "Continuations":
        """Join groups, and sort them by the length of their contexts, the longest first.

        Among equals the earlier one is first. Groups with fewer occurrences are padded.
        """
        most = max(group.tokens.shape[2] for group in groups)
        tokens = jnp.concatenate(
            [
                jnp.pad(
                    group.tokens,
                    ((0, 0), (0, 0), (0, most - group.tokens.shape[2]), (0, 0)),
                    constant_values=-1,
                )
                for group in groups
            ],
            axis=1,
        )
        contexts = jnp.concatenate([group.contexts for group in groups], axis=1)
        order = jnp.argsort(-contexts, axis=1, stable=True)
        return cls(
            jnp.take_along_axis(tokens, order[..., None, None], axis=1),
            jnp.take_along_axis(contexts, order, axis=1),
        )

    def all_members(self) -> jax.Array:
        """Return ``[B, 1, G * K]`` bool: all occurrences may follow the root."""
        batch, groups, count, _ = self.tokens.shape
        return jnp.ones((batch, 1, groups * count), bool)

    def at(self, depth: jax.Array | int) -> jax.Array:
        """Return the token ``[B, G * K]`` of each occurrence at ``depth``, 0 below the root."""
        tokens = jax.lax.dynamic_index_in_dim(self.tokens, depth, axis=3, keepdims=False)
        return tokens.reshape(tokens.shape[0], -1)

    def next_tokens(
        self, members: jax.Array, depth: jax.Array | int
    ) -> tuple[jax.Array, jax.Array]:
        """Return the tokens that may follow some nodes, and the share of each.

        Of n occurrences of a group that go on, c go on with a token. If its context has w tokens,
        those drafted since included, the share of this token is ``(w c + s) / (w n + 1)``, where s
        is its share by the groups with shorter contexts. So an occurrence counts the more, the more
        tokens agree with it, and what has occurred after a longer context comes before what has
        occurred after shorter ones alone. The rest, up to 1, is for tokens that have not occurred.

        Args:
            members: ``[B, F, G * K]`` bool, the occurrences that go on as the path to each of F
                nodes.
            depth: the depth of the nodes, 0 for the root.

        Returns:
            The tokens ``[B, F, G * K]`` and their shares. Each token stands at the first occurrence
            that goes on with it; all other places have -1, and a share of 0.
        """
        num_groups, count = self.tokens.shape[1:3]
        following = self.at(depth)
        goes_on = members & (following >= 0)[:, None]
        equal = following[:, :, None] == following[:, None]
        group = jnp.arange(num_groups * count) // count
        in_group = (group[:, None] == jnp.arange(num_groups)).astype(jnp.float32)
        # counts[b, f, s, g]: how many occurrences of group g go on as occurrence s does.
        counts = jnp.einsum(
            "bft,bst,tg->bfsg", goes_on.astype(jnp.float32), equal.astype(jnp.float32), in_group
        )
        sizes = jnp.einsum("bft,tg->bfg", goes_on.astype(jnp.float32), in_group)
        weights = (self.contexts + depth).astype(jnp.float32)
        shares = jnp.zeros(goes_on.shape, jnp.float32)
        for place in reversed(range(num_groups)):  # the shortest contexts first
            weight = weights[:, None, None, place]
            size = sizes[:, :, None, place]
            shares = (weight * counts[..., place] + shares) / (weight * size + 1)
        earlier = jnp.tril(equal, k=-1)
        is_repeated = jnp.any(goes_on[:, :, None] & earlier[:, None], axis=-1)
        is_first = goes_on & ~is_repeated
        tokens = jnp.where(is_first, following[:, None], -1)
        return tokens, jnp.where(is_first, shares, 0.0)
