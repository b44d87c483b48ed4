"""What a fresh process pays: import, first call with and without a cache, new row counts, the cost of a call.

python benchmarks/overhead.py
"""

import json

from expertile._bench import host

if __name__ == "__main__":
    print(json.dumps(host(), indent=1))
