#!/usr/bin/env bash
# Ray's token: who has it runs code in every process of the cluster. Use: source it.

# Creates the token in the file $1 with mode 600, unless there is one. Of several that do so at once one wins.
ray_token_create() {
    [[ -e $1 ]] && return
    (umask 077 && mkdir -p "$(dirname "$1")" && head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n' >"$1.$$") || return
    ln "$1.$$" "$1" 2>/dev/null || [[ -e $1 ]]
    local made=$?
    rm -f "$1.$$"
    return "$made"
}

# Switches Ray's token on, unless RAY_AUTH_MODE says otherwise. Ray decides anew in each process where the variable is
# unset: processes with and without a token then meet on one machine and fail.
ray_token_use() {
    export RAY_AUTH_MODE="${RAY_AUTH_MODE:-token}"
    if [[ $RAY_AUTH_MODE != token || -n ${RAY_AUTH_TOKEN:-} ]]; then
        return
    fi
    export RAY_AUTH_TOKEN_PATH="${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}"
    if ! ray_token_create "$RAY_AUTH_TOKEN_PATH" || ! chmod go= "$RAY_AUTH_TOKEN_PATH"; then
        echo "cannot write Ray's token to $RAY_AUTH_TOKEN_PATH; set RAY_AUTH_TOKEN_PATH to a file of yours" >&2
        return 1
    fi
}
