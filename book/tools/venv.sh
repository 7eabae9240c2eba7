#!/bin/sh
# venv.sh DIR [PYTHON]: make the environment DIR with the named Python, or
# with the first one found that is new enough. What is there already is kept.
dir=$1
wanted=$2
new='import sys; sys.exit(sys.version_info < (3, 11))'

if [ -x "$dir/bin/python" ] && "$dir/bin/python" -c "$new" 2>/dev/null; then
    exit 0
fi
seen=
for python in ${wanted:-python3 python3.13 python3.12 python3.11 python}; do
    command -v "$python" >/dev/null 2>&1 || continue
    if ! version=$("$python" -c \
        'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null); then
        continue
    fi
    if "$python" -c "$new"; then
        echo "Making $dir with $python ($version)"
        if ! "$python" -m venv "$dir"; then
            rm -rf "$dir"
            echo "$python could not make an environment. On Debian and" \
                "Ubuntu: apt install python3-venv" >&2
            exit 1
        fi
        exit 0
    fi
    seen="$seen $python is $version;"
done
if [ -z "$seen" ]; then
    echo "Python was not found${wanted:+ under the name $wanted}." \
        "The book needs Python 3.11 or newer:" \
        "https://www.python.org/downloads/" >&2
else
    echo "Python is too old:$seen the book needs 3.11 or newer." \
        "If you have one, name it: make PYTHON=/path/to/python3" >&2
fi
exit 1
