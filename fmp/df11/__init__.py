"""DF11: bf16 weights without loss in about 10.6 bits each.

    compressed = fmp.df11.compress(params)        bf16 tensors become nodes; everything that carries trees carries them
    params = fmp.df11.decompress(compressed)      the same bits
    block = fmp.df11.frozen(block)                takes compressed weights, and decodes them where it needs them
    small = fmp.df11.wrap(module)                 a copy of an nn.Module that does so
    fmp.df11.save(compressed, path)               one file, with a checksum for every tensor; load(path) reads it

`fmp.df11_codec.layout` shows how a compressed tensor lies in memory, and why.
"""

from fmp.df11.ahead import decode_ahead as decode_ahead
from fmp.df11.compressed import CompressedTensor as CompressedTensor
from fmp.df11.container import WeightFile as WeightFile, load as load, open as open, save as save
from fmp.df11.frozen import frozen as frozen
from fmp.df11.frozen_weight import FrozenWeight as FrozenWeight
from fmp.df11.published.reader import read_dfloat11 as read_dfloat11
from fmp.df11.published.writer import write_dfloat11 as write_dfloat11
from fmp.df11.trees import compress as compress, decompress as decompress
from fmp.df11.wrap import wrap as wrap
