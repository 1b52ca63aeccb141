;;; Layers. Weights lie [in out]; every layer takes :name and :share.

(deflayer linear (x units &key (bias true) (init nil))
  "x w + b over the last axis: [… in] -> [… units]. Weight and bias are uniform ±1/√in unless :init says otherwise."
  (let* ((inputs (dim x -1))
         (bound (/ 1 (sqrt inputs)))
         (start (or init (uniform :low (- bound) :high bound)))
         (y (matmul x (param "weight" [inputs units] :init start))))
    (if bias
        (+ y (param "bias" [units] :init (uniform :low (- bound) :high bound)))
        y)))
