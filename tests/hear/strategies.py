"""Hypothesis strategies for messages, read off their types, so that a new field is never missed."""

from typing import Any

from hypothesis import strategies as st
from msgspec import inspect

from hear.codec import KINDS
from hear.messages import Key, Message

# Few letters, so that equal names come up, and some that a subject has to escape.
names = st.text(alphabet="ab.-*>% é", max_size=4)
hashes = st.integers(0, 2**64 - 1)
times = st.floats(0, 1e9)


def of_type(described: inspect.Type) -> st.SearchStrategy[Any]:
    """All values that a field of this type can have on the wire."""
    match described:
        case inspect.Metadata(type=inner):
            return of_type(inner)
        case inspect.NoneType():
            return st.none()
        case inspect.BoolType():
            return st.booleans()
        case inspect.IntType(ge=low):
            return st.integers(-(2**63) if low is None else low, 2**64 - 1)
        case inspect.FloatType(ge=low, gt=above, le=high):
            least = low if low is not None else above
            return st.floats(
                min_value=least, max_value=high, exclude_min=above is not None, allow_nan=False
            )
        case inspect.StrType():
            return names
        case inspect.BytesType():
            return st.binary(max_size=24)
        case inspect.LiteralType(values=values):
            return st.sampled_from(values)
        case inspect.UnionType(types=types):
            return st.one_of([of_type(each) for each in types])
        case inspect.VarTupleType(item_type=item):
            return st.lists(of_type(item), max_size=3).map(tuple)
        case inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(of_type(key), of_type(value), max_size=3)
        case inspect.StructType(cls=cls, fields=fields):
            required = {f.name: of_type(f.type) for f in fields if f.required}
            optional = {f.name: of_type(f.type) for f in fields if not f.required}
            return st.fixed_dictionaries(required, optional=optional).map(lambda d: cls(**d))
    raise NotImplementedError(f"no strategy for {described}")


keys: st.SearchStrategy[Key] = of_type(inspect.type_info(Key))
messages: st.SearchStrategy[Message] = st.one_of(
    [of_type(inspect.type_info(kind.type)) for kind in KINDS.values()]
)
