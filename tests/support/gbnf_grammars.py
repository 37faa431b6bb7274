"""Grammars like those in llama.cpp's folder `grammars`, with valid and invalid texts.

Written for these tests. The names of the grammars and their features are llama.cpp's: white space after each word,
nullable rules, bounded repetitions, negated classes, recursion, classes of Japanese letters.
"""

from __future__ import annotations

_JSON_REST = r"""
value ::= object | list | text | number | ("null" | "true" | "false") space
object ::= "{" space ( text ":" space value ("," space text ":" space value)* )? "}" space
list ::= "[" space ( value ("," space value)* )? "]" space
text ::= "\"" (
    [^"\\\x7F\x00-\x1F]   # no control characters
  | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4})
  )* "\"" space
number ::= ("-"? ("0" | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]{1,15})? space
# at most one line break, and its indentation
space ::= | " " | "\n" [ \t]{0,20}
"""

GRAMMARS: dict[str, tuple[str, list[str], list[str]]] = {
    "json": (
        "root ::= object" + _JSON_REST,
        ["{}", '{ "a": [1, -0.5e+3, "x\\"\\u00e9", null], "b":\n  {}}\n', '{"é":"😀"} '],
        ["", "[]", '{"a":}', '{"a":01}', '{"a"  :1}', '{"a":1,}', '{"a":"\\x"}', '{"a":"\n"}', "{}  "],
    ),
    "json_arr": (
        r'root ::= "[\n" space (value (",\n" space value)*)? "]"' + _JSON_REST,
        ["[\n]", '[\n{"a":1},\n[2],\n "x"]'],
        ["[]", "[\n1, 2]", "[\n1]\n", "[\n1,\n]"],
    ),
    "arithmetic": (
        r"""
root ::= (sum "=" space term "\n")+
sum ::= term ([-+*/] term)*
term ::= name | number | "(" space sum ")" space
name ::= [a-z] [a-z0-9_]* space
number ::= [0-9]+ space
space ::= [ \t\n]*
""",
        ["1=2\n", "a_1 +(2*b) = 3\n\nx=4\n", "((1))= \n y\n"],
        ["1=2", "1+=2\n", "(1=2\n", "A=1\n", "1=2\n\n3"],
    ),
    "list": (
        r'root ::= entry+' + '\n' + r'entry ::= "- " [^\r\n\x0b\x0c\x85\u2028\u2029]+ "\n"',
        ["- a\n", "- é 😀 - \n- b\n"],
        ["- a", "- \n", "-a\n", "- a\u2028\n", "- a\n\n", "- a\u0085\n"],
    ),
    "chess": (
        r"""
# the first move is "1. "
root ::= "1. " move " " move "\n" ([1-9] [0-9]? ". " move " " move "\n")+
move ::= (piece | pawn | castle) [+#]?
piece ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
castle ::= "O-O" "-O"?
""",
        ["1. e4 e5\n2. Nf3 Nc6\n", "1. e4 d5\n2. exd5 Qxd5+\n12. O-O-O e1=Q#\n"],
        ["1. e4 e5\n", "1. e4 e5\n2. Nf3\n", "1. e9 e5\n2. Nf3 Nc6\n", "1. e4 e5\n100. a1 a1\n"],
    ),
    "c": (
        r"""
root ::= function*
function ::= type name "(" parameter? ")" "{" statement* "}"
type ::= "int" gap | "float" gap | "char" gap
name ::= [a-zA-Z_] [a-zA-Z_0-9]*
parameter ::= type name
statement ::=
  ( type name gap "=" gap sum ";" ) |
  ( name gap "=" gap sum ";" ) |
  ( name gap "(" list? ")" ";" ) |
  ( "return" gap sum ";" ) |
  ( "while" "(" test ")" "{" statement* "}" ) |
  ( "if" "(" test ")" "{" statement* "}" ("else" "{" statement* "}")? ) |
  ( "//" [^\n]* "\n" ) |
  ( "/*" ( [^*] | ("*" [^/]) )* "*/" )
test ::= sum ("<=" | "<" | "==" | "!=" | ">=" | ">") sum
sum ::= term (("+" | "-") term)*
term ::= factor (("*" | "/") factor)*
factor ::= name | number | "-" factor | name "(" list? ")" | "(" gap sum gap ")"
list ::= sum ("," gap sum)*
number ::= [0-9]+
gap ::= ([ \t\n]+)
""",
        [
            "",
            "int f(){}",
            "int main(int n){int i = n*2;if(i<=4){return -f(1, x);}else{i = 3;}}",
            "char f(){// a {}\n/* b *c */while(a==b){intx = 1;}}float g(float x){/*/ */return 1;}",
        ],
        ["int (){}", "int f(){return 1}", "int f(){/* a }", "intf(){}", "int f(){int i= 1;}", "int f(){if(a){}}"],
    ),
    "japanese": (
        r"""
root ::= letter+ ([ \t\n] letter+)*
letter ::= kana | mark | kanji
kana ::= [ぁ-ゟ] | [\u30A1-\u30FF]
mark ::= [、-〾]
kanji ::= [\u4E00-\U00009FFF]
""",
        ["ひらがな カタカナ\n漢字。", "「猫」"],
        ["", "a", "ひら  がな", " ひ", "한"],
    ),
    "english": (
        r"""
root ::= word ([ \t\n] word)*
word ::= [A-Za-z0-9'"$%&()+,./:;<=>?@_\[\]-]+
""",
        ["Hello, \"world\" [a-b] $1.5"],
        ["", "Grüße", "a  b", "a "],
    ),
}  # fmt: skip
