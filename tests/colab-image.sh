#!/usr/bin/env bash
# Inside Colab's image: install bft_ref as a notebook does, check that nothing
# of Colab's was changed, then run every notebook and compare its facts.
set -euo pipefail
python3 -m pip freeze --all | sort >/tmp/before
python3 -m pip install --quiet "bft_ref[llm,oracles,recommend] @ file://$PWD"
python3 -m pip freeze --all | sort >/tmp/after
lost=$(comm -23 /tmp/before /tmp/after)
if [ -n "$lost" ]; then
    echo "the install changed packages of Colab's: $lost"
    exit 1
fi
python3 -m pip install --quiet --no-deps nbval coverage pytest pluggy iniconfig
cd notebooks
BFT_FACTS=check python3 -m pytest --nbval-lax --nbval-current-env \
    --nbval-cell-timeout 300 -p no:cacheprovider [0-9]*.ipynb
