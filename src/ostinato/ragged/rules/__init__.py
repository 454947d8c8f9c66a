"""The rules of JAX's primitives, one file for each family."""

from . import associative as associative
from . import calls as calls
from . import control as control
from . import custom as custom
from . import debug as debug
from . import elementwise as elementwise
from . import errors as errors
from . import indexing as indexing
from . import leading as leading
from . import linalg as linalg
from . import pieces as pieces
from . import products as products
from . import randomness as randomness
from . import recurrent as recurrent
from . import reduce as reduce
from . import shape as shape
from . import sorting as sorting
from . import tiers as tiers
from . import updates as updates
from . import windows as windows
