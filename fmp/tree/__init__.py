"""Pytrees: frozen dataclasses that every transform understands, and the few tree functions that a train step needs.

None is a leaf everywhere in fmp, so a tree with holes (a leaf without a master, a parameter without a gradient) keeps
its structure. Dictionaries are flattened in sorted key order, as optree does it.
"""

from fmp.tree.nodes import (
    dataclass as dataclass,
    replace as replace,
    static as static,
)
from fmp.tree.structure import (
    Spec as Spec,
    describe as describe,
    flatten as flatten,
    items as items,
    join as join,
    leaves as leaves,
    map as map,
    map_with_path as map_with_path,
    paths as paths,
    structure as structure,
    unflatten as unflatten,
)
from fmp.tree.values import (
    all_finite as all_finite,
    cast as cast,
    check_flag as check_flag,
    global_norm as global_norm,
    select as select,
)
