"""The latent cache of one layer.

    cache [num_pages, page_size, L + r]          one page, page_size tokens:
                                                 +--------------------------+---------------+
    slot = page * page_size + offset             | normed latent, L values  | rotated key r |  token at offset 0
                                                 +--------------------------+---------------+
    token i of a sequence lives in               |          ...             |     ...       |
    page_table[i // page_size] at i % page_size  +--------------------------+---------------+

The latent is stored after its norm and the key after rotation, so a cached token needs no work when it is attended again.
"""

from hw.cache_spec import LayerCache, PagedEntry
from mla.config import MLAConfig


def latent_cache(config: MLAConfig, dtype: str) -> LayerCache:
    """What one MLA layer caches: one latent entry per token, the same on every TP rank."""
    return LayerCache(paged=(PagedEntry("latent", (config.latent_dim,), dtype),))
